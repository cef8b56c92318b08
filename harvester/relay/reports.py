"""What the mark loop reports to the supervisor. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from harvester.outbox.copying import Row
from harvester.relay.scan import Bookmark


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
class DatabaseTrouble:
    """What the loop waits for; None when it is over."""

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
    | DatabaseTrouble
    | LoopDied
)
