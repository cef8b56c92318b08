"""`harvester move`: give an outbox to another leader group, or to the same group in another Kafka cluster."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from harvester.errors import LeadershipError
from harvester_cli.options import ConfigOptions, grouped


@grouped
def move(
    options: ConfigOptions,
    unreleased: Annotated[
        bool,
        typer.Option("--unreleased", help="The old group's leader is certainly dead and did not release its term."),
    ] = False,
) -> None:
    """Give the outbox to the leader group and Kafka cluster of this configuration.

    First stop the harvesters to which it belongs. If the last of them was killed, start one of them once more and stop
    it; use --unreleased only if that is impossible: the first leader of the new group then waits for what the old one
    may still send, and if the old one was exactly-once, records may be published again.
    """
    settings = options.load()

    from harvester.outbox.connection import database_errors
    from harvester.outbox.leader_session import TermSession
    from harvester.wiring import expiry_s, owner_of

    ours = owner_of(settings)
    session = TermSession(settings.dsn, settings.table, "harvester move", 10.0)
    with closing(session), database_errors("move the outbox"):
        session.open()
        row = session.read_term()
        if row.owner == ours:
            typer.echo(f"nothing to do: {settings.table} belongs to {ours}")
            return
        if row.lent_to is not None:
            raise LeadershipError(f"{row.lent_to} has borrowed the term, or asks for it", hint="wait until it is done")
        if row.holder is not None and not unreleased:
            raise LeadershipError(
                f"{row.name!r} of {row.owner} has not released its term of {settings.table}",
                hint="stop its harvesters (SIGTERM); `harvester move --help` explains what to do if they were killed",
            )
        if not session.move(row, ours):
            raise LeadershipError(
                f"a harvester of {row.owner} has just taken or released the term of {settings.table}",
                hint="stop all of them, then run this again",
            )
    typer.echo(f"{settings.table} now belongs to {ours}, previously to {row.owner}")
    if row.holder is not None:
        typer.echo(f"its first leader waits {expiry_s(settings):.0f} s for what {row.name!r} may still send")
