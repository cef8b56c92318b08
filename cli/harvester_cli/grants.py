"""`harvester grants`: least privileges of relays, writers, callers and monitors, as SQL for the owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester.errors import DatabaseUnavailable
from harvester_cli.options import ConfigOptions, grouped
from harvester_cli.output import connected

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.outbox.catalog import Facts


def _role(name: str, help_: str) -> Any:
    return typer.Option(name, metavar="ROLE", help=help_)


@grouped
def grants(
    options: ConfigOptions,
    relay: Annotated[list[str] | None, _role("--relay", "A role with which harvesters log in.")] = None,
    writer: Annotated[list[str] | None, _role("--writer", "A role that only adds records.")] = None,
    caller: Annotated[
        list[str] | None, _role("--caller", "A role that only calls the functions for writers (`init --functions`).")
    ] = None,
    monitor: Annotated[
        list[str] | None, _role("--monitor", "A role that only reads: `status`, `dead list` and `dead show`.")
    ] = None,
) -> None:
    """Print the SQL that gives roles the least privileges they need; changes nothing.

    The roles must exist. Run the SQL as the owner of the tables, after `harvester init`, and again after an update or a
    change of `archive` or `poison.notice_topic`:

        harvester grants --relay relay --writer app | psql --set ON_ERROR_STOP=1
    """
    if not relay and not writer and not caller and not monitor:
        raise typer.BadParameter("name a role with --relay, --writer, --caller or --monitor", param_hint="--relay")
    settings = options.load()

    from harvester.outbox.sql.grants import GrantTarget, script

    place = GrantTarget.of(
        settings.table,
        _facts(settings),
        archive=settings.archive != "off",
        notices=bool(settings.poison.notice_topic),
    )
    text = script(place, relays=relay or (), writers=writer or (), callers=caller or (), monitors=monitor or ())
    typer.echo(f"-- The least privileges on {settings.table}. May be run more than once.")
    typer.echo(text, nl=False)


def _facts(settings: Config) -> Facts | None:
    from harvester.outbox.connection import database_errors
    from harvester.outbox.schema import read_facts

    # Like `init --print`: if the database cannot be reached, the tables are assumed to be those of `init`.
    try:
        with connected(settings, "grants") as connection, database_errors(f"inspect {settings.table}"):
            return read_facts(connection, settings.table)
    except DatabaseUnavailable as error:
        typer.echo(f"harvester: {error}; the SQL is for the tables as created by `harvester init`", err=True)
        return None
