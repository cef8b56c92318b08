"""The `harvester` command: one file per subcommand, errors as one line plus a hint, documented exit codes.

Only light imports at the top of any file of this package: `harvester --help` must not load Kafka, PostgreSQL or
rich's machinery.
"""

from __future__ import annotations

import os
import sys

import typer

from . import config, dead, demo, grants, init, pump, stack, start, status, verify

app = typer.Typer(
    name="harvester",
    help="Moves outbox rows from PostgreSQL to Kafka: loses none, keeps each key's order, survives crashes.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command("start")(start.start)
app.command("init")(init.init)
app.command("grants")(grants.grants)
app.command("status")(status.status)
app.command("pump")(pump.pump)
app.command("verify")(verify.verify)
app.command("demo")(demo.demo)
app.add_typer(config.app, name="config")
app.add_typer(dead.app, name="dead")
app.add_typer(stack.app, name="stack")


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
