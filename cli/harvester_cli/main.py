"""The `harvester` command: one file per subcommand, errors as one line plus a hint, documented exit codes.

Only light imports at the top of any file of this package: `harvester --help` must not load Kafka, PostgreSQL or
rich's machinery.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


_PANELS = {
    "Run": ("start", "demo", "systemd", "stack"),
    "Control a running harvester": ("watch", "pause", "resume", "remark", "scale", "loglevel", "stop"),
    "Set up": ("init", "adopt", "grants", "move", "config"),
    "Inspect and repair": ("status", "doctor", "dead", "pump", "verify"),
    "Consume and process": ("consume", "claims", "pipeline"),
}
_WORDS = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "path": "PATH", "uuid": "UUID"}
_TYPE_NAME = re.compile(r"<(?:list\[)?(int|float|str|path|uuid)(?: range)?\]?>", re.IGNORECASE)


class _Commands(TyperGroup):
    """The commands by purpose, and words instead of the names of Python's types."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _name_values(command, ctx)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, names in _PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


def _name_values(command: Any, ctx: Any) -> None:
    for parameter in command.params:
        display = getattr(parameter, "display_type", None)  # older versions of Typer write TEXT and the like
        shown = display(ctx) if display is not None else ""
        found = _TYPE_NAME.fullmatch(shown)
        word = _WORDS[found[1].lower()] if found else re.sub(r"^<list\[(.*)\]>$", r"<\1>", shown)
        if word != shown:
            parameter.display_type = lambda _context, word=word: word
    for inner in getattr(command, "commands", {}).values():
        _name_values(inner, ctx)


app = typer.Typer(
    name="harvester",
    cls=_Commands,
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
