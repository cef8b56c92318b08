"""Commands of the state machine, performed by the supervisor in their order, and reports of the marker. Values only."""

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
    """Raise the term in the database and name `holder` in it (P8); end the sessions of the predecessor first (P7).

    `lost`: how many terms in a row were lost to others although the group trusted this process (P37).
    """

    holder: UUID
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseTerm:
    """Nothing of this term is on the wire or unpurged any more: say so in the database."""

    term: int
    holder: UUID


@dataclass(frozen=True, slots=True)
class Mark:
    """Go on with the scan under this leader id, or begin it if the id is new; take up to `limit` rows.

    `idle` counts the empty marks before this one: the marker waits longer each time, or until it is woken. `rested`:
    the last one took all there was, so there is no haste. `is_proof`: when there is nothing, find out why; not between
    rows that trickle in.
    """

    number: int
    term: int
    holder: UUID
    leader_id: UUID
    limit: int
    idle: int = 0
    rested: bool = False
    is_proof: bool = True
    kept: tuple[int, ...] = ()  # on the wire since before the last remark: a mark that writes leaves them alone


@dataclass(frozen=True, slots=True)
class Fetch:
    number: int
    term: int
    holder: UUID
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Name every id in the table that the scan has passed."""

    number: int
    term: int
    holder: UUID


@dataclass(frozen=True, slots=True)
class SaveBookmark:
    """Keep in the term row where the scan of the next leader id may begin (P38)."""

    term: int
    holder: UUID
    bookmark: Bookmark


@dataclass(frozen=True, slots=True)
class OpenTrust:
    """Let the shards produce for as long as the member proves that this process leads."""


@dataclass(frozen=True, slots=True)
class CloseTrust:
    """No shard may produce from now on."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End this shard with SIGKILL. Its death is reported as any other; `own_fault`: it counts as a crash."""

    shard: int
    reason: str
    own_fault: bool = True


@dataclass(frozen=True, slots=True)
class Resize:
    """There are this many shards from now on: start what is missing, end what is too many. Nothing is unsettled."""

    shards: int


@dataclass(frozen=True, slots=True)
class Announce:
    event: Event


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is unsettled any more: the drain that was asked for is complete."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """A mark that left nothing out found no row, and nothing is unsettled: the outbox is empty."""


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
    """The term row of `server` names `holder` under `term`. `went_back`: the row, or the ids, had gone back (P9).

    `lanes`: how many there are to be fenced (exactly-once mode). `in_doubt`: the term before was at least once and was
    not released.
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
    """The term row names somebody else, or could not be taken because trust was over."""

    holder: UUID


@dataclass(frozen=True, slots=True)
class TermWanted:
    """Somebody asks for the term, to have it on loan (P32)."""

    holder: UUID
    by: str


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark's rows, by id. `floor`: no row can appear below it any more; None: not known.

    `bookmark`: how far the scan has come, settled or not; only now and then.
    """

    number: int
    rows: list[Row]
    floor: int | None = None
    bookmark: Bookmark | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch's rows, by id."""

    number: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Looked:
    """Every id of the table that the scan has passed."""

    number: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class StatementFailed:
    """A statement was sent and failed."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class ServerChanged:
    """The session is with another database than the one that the term was taken on (P9)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScanRestarted:
    """The scan begins anew, and how far it had come means nothing: a crash of the server may have taken ids back."""


@dataclass(frozen=True, slots=True)
class DatabaseTrouble:
    """What the loop waits for; None when it is over."""

    text: str | None


@dataclass(frozen=True, slots=True)
class TermWait:
    """What taking the term waits for, by design or because a lane cannot be opened; None when it is over."""

    text: str | None


@dataclass(frozen=True, slots=True)
class LoopDied:
    """The loop ended by an error that nobody foresaw."""

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
