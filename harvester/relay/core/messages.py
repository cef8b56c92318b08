"""Commands of the state machine, which the supervisor performs in order, and reports of the marker. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from harvester.events import Event
from harvester.outbox.sql.queries import Row
from harvester.relay.core.frames import Frame
from harvester.relay.core.scan import Bookmark


@dataclass(frozen=True, slots=True)
class Send:
    shard: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class TakeTerm:
    """Raise the term in the database with `holder` in it (P8); first end the predecessor's sessions (P7).

    `lost`: how many terms in a row were lost to others although the group trusted this process (P37).
    """

    holder: UUID
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseTerm:
    """Nothing of this term is on the wire or unpurged any more: record that in the database."""

    term: int
    holder: UUID


@dataclass(frozen=True, slots=True)
class Mark:
    """Continue the scan under this leader id, or start it if the id is new; take up to `limit` rows.

    `idle` counts the preceding empty marks: the marker waits longer each time, or until it is woken. `rested`: the last
    mark took everything there was, so there is no hurry. `is_proof`: if there is nothing, find out why; not used
    between rows that trickle in.
    """

    number: int
    term: int
    holder: UUID
    leader_id: UUID
    limit: int
    idle: int = 0
    rested: bool = False
    is_proof: bool = True
    kept: tuple[int, ...] = ()  # on the wire since before the last remark: a writing mark leaves them alone


@dataclass(frozen=True, slots=True)
class Fetch:
    number: int
    term: int
    holder: UUID
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Read every id in the table that the scan has passed: the highest `width` ids up to `high`, given or not.

    `high` None: the highest that the scan has passed; `width` None: all.
    """

    number: int
    term: int
    holder: UUID
    high: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class SaveBookmark:
    """Save in the term row where the scan of the next leader id may begin (P38)."""

    term: int
    holder: UUID
    bookmark: Bookmark


@dataclass(frozen=True, slots=True)
class OpenTrust:
    """Let the shards produce for as long as the group member proves that this process leads."""


@dataclass(frozen=True, slots=True)
class CloseTrust:
    """No shard may produce from now on."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End this shard with SIGKILL. Its death is reported like any other; `own_fault`: it counts as a crash."""

    shard: int
    reason: str
    own_fault: bool = True


@dataclass(frozen=True, slots=True)
class Resize:
    """Change to this many shards: start missing ones, end surplus ones. Nothing is unsettled."""

    shards: int


@dataclass(frozen=True, slots=True)
class Announce:
    event: Event


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is unsettled any more: the requested drain is complete."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """A complete mark found no row, and nothing is unsettled: the outbox is empty."""


Command = (
    Send
    | TakeTerm
    | ReleaseTerm
    | Mark
    | Fetch
    | Look
    | SaveBookmark
    | OpenTrust
    | CloseTrust
    | Kill
    | Resize
    | Announce
    | Drained
    | Emptied
)


@dataclass(frozen=True, slots=True)
class TermTaken:
    """The term row of `server` names `holder` under `term`. `went_back`: the row or the ids had gone back (P9).

    `lanes`: how many must be fenced (exactly-once mode). `in_doubt`: the previous term was at-least-once and was not
    released.
    """

    holder: UUID
    term: int
    server: str | None
    went_back: bool
    incarnation: UUID
    lanes: int = 0
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class TermGone:
    """The term row names another holder, or could not be taken because trust had expired."""

    holder: UUID


@dataclass(frozen=True, slots=True)
class TermWanted:
    """Another process asks to borrow the term (P32)."""

    holder: UUID
    by: str


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark's rows, in id order. `floor`: no row can appear below it any more; None: unknown.

    `bookmark`: how far the scan has come, settled or not; set only occasionally.
    """

    number: int
    rows: list[Row]
    floor: int | None = None
    bookmark: Bookmark | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch's rows, in id order."""

    number: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Looked:
    """The ids that the look was for. `rest`: the highest id below them; None: there is none."""

    number: int
    ids: list[int]
    rest: int | None = None


@dataclass(frozen=True, slots=True)
class StatementFailed:
    """A statement was sent and failed, or a look took too long."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class ServerChanged:
    """The session is with a different database from the one on which the term was taken (P9)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScanRestarted:
    """The scan starts over, and its previous position is void: a crash of the server may have undone given-out ids."""


@dataclass(frozen=True, slots=True)
class DatabaseTrouble:
    """What the loop is waiting for; None when that is over."""

    text: str | None


@dataclass(frozen=True, slots=True)
class TermWait:
    """What taking the term is waiting for, by design or because of Kafka; None when that is over."""

    text: str | None


@dataclass(frozen=True, slots=True)
class LoopDied:
    """The loop ended with an unexpected error."""

    error: Exception


Report = (
    TermTaken
    | TermGone
    | TermWanted
    | Marked
    | Fetched
    | Looked
    | StatementFailed
    | ServerChanged
    | ScanRestarted
    | DatabaseTrouble
    | TermWait
    | LoopDied
)
