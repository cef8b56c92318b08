"""What the mark loop reports: each becomes an event of the relay machine, a trouble or an end. Core thread only."""

from __future__ import annotations

from harvester.relay import leadership, outcomes
from harvester.relay.performing import Outlets, Performer
from harvester.relay.reports import (
    DatabaseTrouble,
    Fetched,
    Looked,
    LoopDied,
    Marked,
    Report,
    ServerChanged,
    StatementFailed,
    TermGone,
    TermTaken,
    TermWanted,
)


def heed(performer: Performer, report: Report, now: float, to: Outlets) -> None:
    """One report, with all that follows from it."""
    relay, perform = performer.relay, performer.perform
    match report:
        case Marked(number, rows, floor, bookmark):
            perform(outcomes.marked(relay, number, rows, now, floor, bookmark))
        case Fetched(number, rows):
            perform(outcomes.fetched(relay, number, rows, now))
        case Looked(number, ids):
            missed, commands = outcomes.looked(relay, number, ids, now)
            if missed:
                to.log(None).warning("a look at the whole table found %d rows that marks had not shown", missed)
            perform(commands)
        case StatementFailed(number, error):
            perform(outcomes.statement_failed(relay, number, error, now))
        case ServerChanged(reason):
            performer.change_server(reason, now)
        case TermTaken(holder, term, server, went_back, incarnation, lanes, in_doubt):
            relay.tenure.lanes = lanes
            perform(leadership.term_taken(relay, holder, term, server, now, went_back, incarnation, in_doubt))
        case TermGone(holder):
            if holder == relay.tenure.holder:
                performer.lose_term(now)
        case TermWanted(holder, by):
            performer.lend(holder, by, now)
        case DatabaseTrouble(text):
            to.trouble("database", text)
        case LoopDied(error):
            to.failed(error)
