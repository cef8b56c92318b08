"""`harvester config`: what the configuration is, and whether it is right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from .options import ConfigOption, JsonOption, LogLevelOption, SetOption, load_with_origin

if TYPE_CHECKING:
    from rich.text import Text

    from harvester.config import Loaded
    from harvester.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Show or check the configuration.")


@app.command("show")
def show(
    config: ConfigOption = None, set_: SetOption = None, log_level: LogLevelOption = None, json_: JsonOption = False
) -> None:
    """Print every setting as it is in effect, and where its value comes from. Secrets are masked."""
    from harvester.config import as_json

    loaded = load_with_origin(config, set_, log_level)
    if json_:
        typer.echo(json.dumps(as_json(loaded), indent=2))
        return
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for line in _as_toml(loaded):
        console.print(line)


@app.command("check")
def check(
    config: ConfigOption = None, set_: SetOption = None, log_level: LogLevelOption = None, json_: JsonOption = False
) -> None:
    """List everything that is wrong, and exit with 78 if anything is. Connects to nothing."""
    from harvester.errors import ConfigurationError

    try:
        loaded = _checked(config, set_, log_level)
    except ConfigurationError as error:
        if not json_:
            raise
        typer.echo(json.dumps(_verdict(error), indent=2))
        raise typer.Exit(int(error.exit_code)) from None
    if json_:
        typer.echo(json.dumps({"ok": True, "source": _source(loaded), "problems": []}, indent=2))
    else:
        typer.echo(f"The configuration is right ({_source(loaded) or 'defaults; there is no file'}).")


def _checked(config: ConfigOption, set_: SetOption, log_level: LogLevelOption) -> Loaded:
    from harvester.config import check_clients
    from harvester.errors import ConfigurationError

    loaded = load_with_origin(config, set_, log_level)
    problems = check_clients(loaded.config)
    if problems:
        raise ConfigurationError(problems, source=_source(loaded))
    return loaded


def _verdict(error: ConfigurationError) -> dict[str, object]:
    problems = [{"path": each.path, "message": each.message, "allowed": each.allowed} for each in error.problems]
    return {"ok": False, "source": error.source, "problems": problems}


def _source(loaded: Loaded) -> str | None:
    return str(loaded.source) if loaded.source else None


def _as_toml(loaded: Loaded) -> list[Text]:
    """Valid TOML, but for the masks; the origin of each value as a comment."""
    from rich.text import Text

    from harvester.config import in_effect, settings_of

    lines = [Text(f"# {_source(loaded) or 'no file: defaults'}", style="dim")]
    table = ""
    for setting in settings_of(loaded):
        if setting.table != table:
            table = setting.table
            lines += [Text(""), Text(f"[{table}]", style="bold")]
        given = setting.origin in ("file", "--set")
        lines.append(Text.assemble(setting.toml, (f"  # {setting.origin}", "green" if given else "dim")))
    lines += [Text(""), Text("# What follows from these:", style="dim")]
    lines += [Text(f"# {name} = {value}", style="dim") for name, value in in_effect(loaded.config).items()]
    return lines
