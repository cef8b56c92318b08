"""The `harvester` command: subcommands, each with its options and its view in one file; errors as one line plus a hint;
documented exit codes.

Only light imports at the top of any file in this package: `harvester --help` must not load Kafka, PostgreSQL or rich's
machinery.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import sys
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from harvester_cli import (
    claims,
    config,
    consume,
    control,
    dead,
    demo,
    doctor,
    outbox,
    stack,
    start,
    status,
    systemd,
    verify,
    watch,
)
from harvester_cli.output import discard
from harvester_cli.pipeline import commands


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"harvester {version('outbox-harvester')}")
        raise typer.Exit


_PANELS: dict[str, dict[str, Any]] = {
    "Run": {"start": start.start, "demo": demo.demo, "systemd": systemd.app, "stack": stack.app},
    "Control a running harvester": {
        "watch": watch.watch, "pause": control.pause, "resume": control.resume, "remark": control.remark,
        "scale": control.scale, "loglevel": control.loglevel, "stop": control.stop,
    },
    "Set up": {
        "init": outbox.init, "adopt": outbox.adopt, "grants": outbox.grants, "move": outbox.move,
        "config": config.app,
    },
    "Inspect and repair": {
        "status": status.status, "doctor": doctor.doctor, "dead": dead.app,
        "pump": verify.pump, "verify": verify.verify,
    },
    "Consume and process": {"consume": consume.consume, "claims": claims.app, "pipeline": commands.app},
}  # fmt: skip
_WORDS = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "path": "PATH", "uuid": "UUID"}
_TYPE_NAME = re.compile(r"<(?:list\[)?(int|float|str|path|uuid)(?: range)?\]?>", re.IGNORECASE)


_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class _Commands(TyperGroup):
    """The commands by purpose, and words instead of the names of Python's types."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _name_values(command, ctx)
        return command

    def invoke(self, ctx: Any) -> Any:
        """As the library does, except that it takes a reader who has gone (`| head`) for a failed command."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:  # it may be closed
                    sys.stdout.flush()
        except BrokenPipeError:
            discard(sys.stdout)
            sys.exit(141)
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            discard(sys.stdout)
            print(f"harvester: standard output cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(1)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, names in _PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


def _name_values(command: Any, ctx: Any) -> None:
    for parameter in command.params:
        display = getattr(parameter, "display_type", None)  # older versions of Typer write TEXT etc.
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
for _panel in _PANELS.values():
    for _name, _command in _panel.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)


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

    atexit.register(_spare_clients)
    try:
        if "NOTIFY_SOCKET" in os.environ:
            _run_for_the_journal()
        else:
            app()
    except HarvesterError as error:
        _print_error(error)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)


def _spare_clients() -> None:
    """End without the C library's clean-up, during which a client that was not closed in time may crash the process.

    OpenSSL's part of it frees what such a client's threads still use.
    """
    if "confluent_kafka" in sys.modules:
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no on_exit
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)  # called with the exit code, before everything registered so far


def _run_for_the_journal() -> None:
    """The same, but with command-line errors as one line of JSON; the parser would print its usage as text."""
    try:
        code = app(standalone_mode=False)  # the code of `typer.Exit`, or the command's result, which is None
    except Exception as error:
        # The class is click's, or Typer's own copy of it, depending on Typer's version.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help lists the options" if context is not None else None
        _print_error(SimpleNamespace(message=error.format_message(), hint=hint))
        sys.exit(error.exit_code)
    sys.exit(code or 0)


def _print_error(error: object) -> None:
    message = getattr(error, "message", str(error))
    hint = getattr(error, "hint", None)
    if "NOTIFY_SOCKET" in os.environ:  # the journal contains only lines of JSON
        from harvester.telemetry.logging import configure

        configure("error", json=True, name="harvester").error("%s", message, extra={"hint": hint} if hint else None)
        return
    print(f"harvester: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
