"""`harvester pause`, `resume`, `remark`, `scale`, `loglevel`, `stop`: control a harvester on this machine.

They exit with 0 on success, 1 if the harvester refused, 2 if several are running and none was named, 69 if none is
running or it does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from harvester_cli.dashboard.figures import counted
from harvester_cli.options import grouped

_MARGIN_S = 10.0


@dataclass
class OneHarvester:
    """Selects one of the running harvesters."""

    name: Annotated[
        str | None, typer.Option("--name", help="The name of the harvester; not needed if only one is running.")
    ] = None
    socket: Annotated[Path | None, typer.Option("--socket", help="The Unix socket of the harvester.")] = None

    def find(self) -> Path:
        """Its socket; raises NoHarvester or SeveralHarvesters."""
        from harvester.control import client

        if self.name is not None and self.socket is not None:
            raise typer.BadParameter("use only one of --name and --socket")
        return client.find(self.name, self.socket)

    def ask(self, command: str, answers_s: float | None = None, **arguments: Any) -> Mapping[str, Any]:
        """Its answer to one request."""
        from harvester.control.client import ANSWERS_S, Connection

        with Connection(self.find()) as connection:
            return connection.ask(command, answers_s=answers_s or ANSWERS_S, **arguments)


@grouped
def pause(one: OneHarvester) -> None:
    """Mark nothing more until `resume`; what is on the wire is finished, the rest goes back to the outbox."""
    told = one.ask("pause")
    wire = told["in_flight"]
    what = "paused" if told["changed"] else "was already paused"
    if told["state"] == "standby":
        what += "; it stands by, and would publish nothing if it took over"
    elif wire:
        what += f"; {counted(wire, 'record')} on the wire still to be settled"
    _say(told, what)


@grouped
def resume(one: OneHarvester) -> None:
    """Mark again after `pause`, from the head of the outbox."""
    told = one.ask("resume")
    _say(told, f"resumed; it is {told['state']}" if told["changed"] else f"was not paused; it is {told['state']}")


@grouped
def remark(one: OneHarvester) -> None:
    """Drop what is queued and mark again from the head of the outbox; this repeats nothing."""
    _say(one.ask("remark"), "marks again from the head of the outbox")


@grouped
def scale(
    shards: Annotated[int, typer.Argument(min=1, max=256, help="The new number of shard processes.")],
    one: OneHarvester,
    within: Annotated[
        float,
        typer.Option("--within", min=0.1, max=60.0, help="Seconds within which everything under way must be settled."),
    ] = 10.0,
) -> None:
    """Change the number of shards until the next start; this repeats and reorders nothing."""
    told = one.ask("scale", answers_s=within + _MARGIN_S, shards=shards, within_s=within)
    wanted = counted(shards, "shard")
    _say(told, f"{wanted} instead of {told['before']}" if told["changed"] else f"already has {wanted}")


@grouped
def loglevel(
    level: Annotated[
        Literal["trace", "debug", "info", "warning", "error"], typer.Argument(help="The lowest level to log.")
    ],
    one: OneHarvester,
) -> None:
    """Change the log level of the supervisor and its shards until the next start."""
    _say(one.ask("loglevel", level=level), f"the log level is {level} now")


@grouped
def stop(
    one: OneHarvester,
    within: Annotated[
        float, typer.Option("--within", min=0.0, help="Seconds to wait for its end; 0: do not wait.")
    ] = 60.0,
) -> None:
    """Stop it gracefully, like SIGTERM, and wait for its end."""
    from harvester.control.client import Connection
    from harvester.control.protocol import ControlError

    with Connection(one.find()) as connection:
        told = connection.ask("stop")
        if not within:
            _say(told, "stops")
        elif connection.wait_ended(within):
            _say(told, "has stopped")
        else:
            raise ControlError(
                f"{told['name']} is still stopping after {within:g} s",
                hint="`harvester watch` shows what it is waiting for",
            )


def _say(told: Mapping[str, Any], what: str) -> None:
    typer.echo(f"{told['name']}: {what}")
