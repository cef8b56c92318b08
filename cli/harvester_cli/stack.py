"""`harvester stack`: run real servers for the demo and the tests, without containers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from harvester.errors import StackError
from harvester_cli import output
from harvester_cli.options import JsonOption
from harvester_cli.output import print_json, print_rich

app = typer.Typer(
    no_args_is_help=True,
    help="Your own PostgreSQL and Kafka broker on loopback, for the demo and for tests.",
)

Directory = Annotated[
    Path | None,
    typer.Option("--directory", "-d", help="The stack's directory [default: $HARVESTER_STACK, otherwise ./.stack]."),
]


@app.command("up")
def up(
    directory: Directory = None,
    *,
    postgres_bin: Annotated[
        Path | None, typer.Option(help="Directory with initdb and postgres to use instead of the wheel's.")
    ] = None,
    dsn: Annotated[str | None, typer.Option(help="Your own PostgreSQL, used instead of starting one.")] = None,
    bootstrap: Annotated[str | None, typer.Option(help="Your own Kafka brokers, used instead of starting one.")] = None,
    durable: Annotated[
        bool, typer.Option("--durable/--fast", help="Survive a power failure, or be faster without fsync.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Start the servers; does nothing if they are already running. They keep running until `harvester stack down`."""
    from harvester import stack

    console = output.console(stderr=True)
    options = stack.StackOptions(
        durable=durable,
        kafka_heap_mb=1024 if durable else 512,
        postgres_bin=postgres_bin,
        dsn=dsn,
        bootstrap=bootstrap,
    )
    stack.up(directory or stack.default_directory(), options, progress=lambda line: console.print(line, style="dim"))
    _show(directory, as_json=as_json)


@app.command("down")
def down(
    directory: Directory = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the data and the directory as well.")] = False,
) -> None:
    """Stop what `up` started here, and nothing else."""
    from harvester import stack

    where = directory or stack.default_directory()
    stopped = stack.down(where, delete=delete)
    names = {"postgres": "PostgreSQL", "kafka": "Kafka"}
    print(f"stopped {' and '.join(names[name] for name in stopped)}" if stopped else "nothing was running")


@app.command("status")
def status(directory: Directory = None, as_json: JsonOption = False) -> None:
    """Show the state of the servers; exits with 1 unless both are running."""
    if not _show(directory, as_json=as_json):
        raise typer.Exit(1)


@app.command("env")
def env(directory: Directory = None) -> None:
    """Print the addresses for a shell: `eval "$(harvester stack env)"`.

    The tests use HARVESTER_TEST_DSN and HARVESTER_TEST_BOOTSTRAP; a configuration file can refer to them as ${...}.
    """
    from harvester import stack

    where = directory or stack.default_directory()
    found = stack.status(where)
    if not found.running:
        raise StackError(f"the stack in {found.directory} is not running", hint="harvester stack up")
    dsn, bootstrap = (server.address or "" for server in found.servers)
    for name, value in (("HARVESTER_TEST_DSN", dsn), ("HARVESTER_TEST_BOOTSTRAP", bootstrap)):
        print(f"export {name}={shlex.quote(value)}")
    settings = {"data_source": dsn, "base_kafka_config.bootstrap.servers": bootstrap}
    options = " ".join(f"--set {shlex.quote(f'{path}={value}')}" for path, value in settings.items())
    print(f"# harvester start {options}")


@app.command("fetch")
def fetch() -> None:
    """Download the Kafka broker into the cache now, so that a later `up` needs no network."""
    from harvester import stack

    stack.broker_jars(progress=lambda line: print(line, file=sys.stderr))


def _show(directory: Path | None, *, as_json: bool) -> bool:
    from harvester import stack

    found = stack.status(directory or stack.default_directory())
    if as_json:
        servers: dict[str, object] = {
            server.name: {
                "state": server.state,
                "address": server.address,
                "pid": server.pid,
                "log": str(server.log) if server.log else None,
            }
            for server in found.servers
        }
        print_json({"directory": str(found.directory), "running": found.running, **servers})
        return found.running
    from rich.table import Table

    table = Table("server", "state", "address", "pid", title=f"stack in {found.directory}", title_justify="left")
    for server in found.servers:
        style = "red" if server.state == "stopped" else "green"
        pid = str(server.pid) if server.pid else "-"
        table.add_row(server.name, f"[{style}]{server.state}[/]", server.address or "-", pid)
    print_rich(table)
    return found.running
