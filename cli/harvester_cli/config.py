"""`harvester config`: show, check or import a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester.errors import ConfigurationError, HarvesterError, Problem
from harvester_cli.options import JsonOption, LoggedOptions, grouped, is_utf8
from harvester_cli.output import console, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from harvester.config import Loaded
    from harvester.config.goharvest import Imported

app = typer.Typer(no_args_is_help=True, help="Show or check the configuration, or import goharvest's.")


@app.command("show")
@grouped
def show(options: LoggedOptions, json_: JsonOption = False) -> None:
    """Print every effective setting, and where its value comes from. Secrets are masked."""
    from harvester.config import as_json

    loaded = options.load_with_origin()
    if json_:
        print_json(as_json(loaded), indent=2)
        return
    screen = console(soft_wrap=True, highlight=False)
    for line in _as_toml(loaded):
        screen.print(line)


@app.command("check")
@grouped
def check(options: LoggedOptions, json_: JsonOption = False) -> None:
    """List every problem; exits with 78 if there is one. Opens no connection."""
    try:
        loaded = _checked(options)
    except ConfigurationError as error:
        if not json_:
            raise
        print_json(_verdict(error), indent=2)
        raise typer.Exit(int(error.exit_code)) from None
    if json_:
        print_json({"ok": True, "source": _source(loaded), "problems": []}, indent=2)
    else:
        typer.echo(f"The configuration is valid ({_source(loaded) or 'defaults; no file'}).")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="goharvest's reaper.yaml.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write; must not exist. (default: standard output)"),
    ] = None,
) -> None:
    """Convert a goharvest configuration into one for the harvester (TOML). Notes on differences are included as
    comments.

    Exits with 78 if the result is not valid yet; it is still written, and the problems are listed.
    """
    from harvester.config.describe import to_toml
    from harvester.config.goharvest import convert

    imported = convert(_read_yaml(file))
    comments = [f"Imported from goharvest's {file.name}.", *(f"note: {note}" for note in imported.notes)]
    text = to_toml(imported.settings, comments)
    if not is_utf8(text):  # YAML can name half of a character: "\ud800"
        raise ConfigurationError([Problem(str(file), "holds text that is not Unicode")])
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write_new(output, text)
        for note in imported.notes:
            typer.echo(f"note: {note}", err=True)
    _check_import(imported)


def _read_yaml(file: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise HarvesterError(
            "reading YAML requires PyYAML", hint="pip install 'outbox-harvester[goharvest]'"
        ) from error
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError([Problem(str(file), f"cannot be read: {error.strerror or error}")]) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # Not chained: these errors contain the file's text.
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigurationError([Problem(str(file), f"is not valid YAML{where}")]) from None


def _write_new(output: Path, text: str) -> None:
    try:
        # It may contain a password.
        with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        problem = Problem(str(output), f"cannot be written: {error.strerror or error}")
        raise ConfigurationError([problem], hint="name a file that does not exist") from error


def _check_import(imported: Imported) -> None:
    from harvester.config import check_clients
    from harvester.config.load import build, interpolate_table

    resolved, problems = interpolate_table(imported.settings, {})
    problems += check_clients(build(resolved))
    if problems:
        raise ConfigurationError(problems, source="the imported configuration")


def _checked(options: LoggedOptions) -> Loaded:
    from harvester.config import check_clients

    return options.load_with_origin(check=check_clients)


def _verdict(error: ConfigurationError) -> dict[str, object]:
    problems = [{"path": each.path, "message": each.message, "allowed": each.allowed} for each in error.problems]
    return {"ok": False, "source": error.source, "problems": problems}


def _source(loaded: Loaded) -> str | None:
    return str(loaded.source) if loaded.source else None


def _as_toml(loaded: Loaded) -> list[Text]:
    """Valid TOML, except for the masks; the origin of each value is a comment."""
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
    lines += [Text(""), Text("# Derived from these:", style="dim")]
    lines += [Text(f"# {name} = {value}", style="dim") for name, value in in_effect(loaded.config).items()]
    return lines
