"""The `harvester` command: one file per subcommand, errors as one line plus a hint, documented exit codes.

Only light imports at the top of any file of this package: `harvester --help` must not load Kafka, PostgreSQL or
rich's machinery.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from harvester_cli import (
    adopt,
    claims,
    config,
    consume,
    control,
    dead,
    demo,
    doctor,
    grants,
    init,
    move,
    pump,
    stack,
    start,
    status,
    systemd,
    verify,
    watch,
)
from harvester_cli.pipeline import commands


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"harvester {version('outbox-harvester')}")
        raise typer.Exit


app = typer.Typer(
    name="harvester",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
    rich_markup_mode=None,  # plain help: rich would take most of the time of `harvester --help`
)
app.command("start")(start.start)
app.command("init")(init.init)
app.command("adopt")(adopt.adopt)
app.command("grants")(grants.grants)
app.command("move")(move.move)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("remark")(control.remark)
app.command("scale")(control.scale)
app.command("loglevel")(control.loglevel)
app.command("stop")(control.stop)
app.command("pump")(pump.pump)
app.command("verify")(verify.verify)
app.command("consume")(consume.consume)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(claims.app, name="claims")
app.add_typer(config.app, name="config")
app.add_typer(dead.app, name="dead")
app.add_typer(commands.app, name="pipeline")
app.add_typer(stack.app, name="stack")
app.add_typer(systemd.app, name="systemd")


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Moves outbox rows from PostgreSQL to Kafka: loses none, keeps each key's order, survives crashes."""


def main() -> None:
    """Run the command line; the only place where foreseeable errors become text and an exit code."""
    from harvester.errors import HarvesterError

    try:
        app()
    except HarvesterError as error:
        _print_error(error)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _print_error(error: object) -> None:
    message = getattr(error, "message", str(error))
    hint = getattr(error, "hint", None)
    print(f"harvester: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
