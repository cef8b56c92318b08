"""`harvester systemd install`: write units with this installation's paths to systemd's directories.

Units for a user are the shipped ones without what needs privileges: a user's manager can create no users, namespaces or
mounts, and knows no system units. The kernel's filters stay.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from harvester.errors import HarvesterError

NAMES = ("harvester.service", "harvester@.service")
PROGRAM = "/opt/harvester/bin/harvester"
FOLDER = "/etc/harvester"
USER_FOLDER = "%E/harvester"  # ~/.config/harvester
_NOT_FOR_USERS = (
    "Wants", "After", "DynamicUser", "CapabilityBoundingSet", "AmbientCapabilities", "ProtectSystem", "ProtectHome",
    "PrivateTmp", "PrivateDevices", "PrivateUsers", "RemoveIPC", "ProtectClock", "ProtectControlGroups",
    "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc",
    "RuntimeDirectory", "RuntimeDirectoryMode",
)  # fmt: skip
_PLAIN = re.compile(r"[A-Za-z0-9._/+@=,-]+", re.ASCII)


def can_stand_in_a_unit(path: str) -> bool:
    """Whether a path needs no quoting: blanks, quotes, `$` and `%` are special in a unit."""
    return _PLAIN.fullmatch(path) is not None


def unit_text(shipped: str, program: str, *, user: bool) -> str:
    """A unit that starts this program."""
    text = shipped.replace(f"ExecStart={PROGRAM} ", f"ExecStart={program} ")
    if not user:
        return text
    text = text.replace(f"{FOLDER}/", f"{USER_FOLDER}/").replace(
        "WantedBy=multi-user.target", "WantedBy=default.target"
    )
    return "\n\n".join(filter(None, map(_for_user, text.split("\n\n")))) + "\n"


def _for_user(block: str) -> str:
    """A block without what is not for users; a comment belongs to the setting below it."""
    kept: list[str] = []
    comments: list[str] = []
    for line in block.strip("\n").split("\n"):
        if line.startswith("#"):
            comments.append(line)
        elif line.partition("=")[0] in _NOT_FOR_USERS:
            comments = []
        else:
            kept += [*comments, line]
            comments = []
    return "\n".join([*kept, *comments])


app = typer.Typer(no_args_is_help=True, help="Run as a service of systemd.")
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - ProtectHome=, PrivateTmp=


@app.callback()
def _group() -> None:
    """Without this, a single command would take the group's place."""


@app.command("install")
def install(
    user: Annotated[bool, typer.Option("--user", help="Install for this user's own manager.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Install for the system's manager; requires root.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Print the units and write nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite modified units.")] = False,
    root: Annotated[Path | None, typer.Option("--root", help="Write below this directory, for images.")] = None,
) -> None:
    """Install harvester.service and harvester@.service (one of several: its configuration file's name)."""
    if user == system:
        raise typer.BadParameter("use --user or --system")
    program = _program()
    if system and not print_:
        _check_visible(program)
    units = {name: unit_text(_shipped(name), program, user=user) for name in NAMES}
    if print_:
        print("\n".join(f"# {name}\n{text}" for name, text in units.items()), end="")
        return
    folder = _folder(user=user, root=root)
    changed = {name: _changed(folder / name, text) for name, text in units.items()}
    if dry_run:
        for name, text in units.items():
            _say_what_would_be(folder / name, text, changed[name])
        return
    _refuse_changed(folder, changed, force=force)
    for name, text in units.items():
        _write(folder / name, text)
    _say_what_is_next(user=user)


def _program() -> str:
    """The console script of this installation."""
    called = Path(sys.argv[0])
    candidates = [Path(sys.executable).parent / "harvester"]
    if called.name == "harvester":
        candidates.insert(0, called if called.is_absolute() else Path.cwd() / called)
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            program = os.path.normpath(path)
            if not can_stand_in_a_unit(program):
                raise HarvesterError(
                    f"{program!r} cannot be used in a unit", hint="install it in a path without blanks"
                )
            return program
    raise HarvesterError(
        "this installation has no harvester command", hint="run pip install outbox-harvester, and use that"
    )


def _check_visible(program: str) -> None:
    # A virtual environment's python is a link to the one that made it.
    for path in (program, os.path.realpath(program), os.path.realpath(sys.executable)):
        if path.startswith(_HIDDEN):
            raise HarvesterError(
                f"{path} is in a directory that the unit hides from its process (ProtectHome=, PrivateTmp=)",
                hint="install the harvester elsewhere, with a Python that is elsewhere:"
                " /usr/bin/python3 -m venv /opt/harvester; or use --user",
            )


def _shipped(name: str) -> str:
    return (files("harvester_cli") / "units" / name).read_text(encoding="utf-8")


def _folder(*, user: bool, root: Path | None) -> Path:
    if user:
        base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        if not base.is_absolute():  # XDG's rule: a relative one counts as not set
            base = Path.home() / ".config"
        folder = base / "systemd" / "user"
    else:
        folder = Path("/etc/systemd/system")
    return folder if root is None else root / folder.relative_to("/")


def _changed(path: Path, text: str) -> bool:
    """Whether the file has other content than `text`, or is a symbolic link; a missing file has not."""
    if path.is_symlink():  # masked, or linked to another file
        return True
    try:
        return path.read_text(encoding="utf-8", errors="replace") != text
    except OSError:  # it does not exist, or writing will show what is wrong
        return False


def _refuse_changed(folder: Path, changed: dict[str, bool], *, force: bool) -> None:
    names = [str(folder / name) for name, is_changed in changed.items() if is_changed]
    if names and not force:
        raise HarvesterError(
            f"existing files differ, so nothing was written: {', '.join(names)}",
            hint="--dry-run shows the difference, --force overwrites; `systemctl edit` keeps your own changes separate",
        )


def _say_what_would_be(path: Path, text: str, changed: bool) -> None:
    if not changed:
        print(f"{path}: {'unchanged' if path.exists() else 'would be written'}")
        return
    print(f"{path}: differs")
    if path.is_symlink():
        print(f"a link to {path.readlink()}")
        return
    now = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(now, text.splitlines(keepends=True), "as it is", "as it would be"))


def _write(path: Path, text: str) -> None:
    """Write it completely or not at all."""
    if path.exists() and not _changed(path, text):
        print(f"{path}: unchanged")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            Path(partial).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(partial).unlink()
            raise
    except OSError as error:
        raise HarvesterError(
            f"{path} could not be written: {error.strerror or error}", hint="--system requires root; --user does not"
        ) from error
    print(f"{path}: written")


def _say_what_is_next(*, user: bool) -> None:
    systemctl = "systemctl --user" if user else "systemctl"
    folder = "~/.config/harvester" if user else FOLDER
    print(f"\nConfiguration: {folder}/harvester.toml, secrets for it: {folder}/harvester.env (mode 0600)")
    print(f"Then: {systemctl} daemon-reload && {systemctl} enable --now harvester")
    print(f"For one of several: harvester@billing, which reads {folder}/billing.toml and billing.env")
    if user:
        print("To let it run while you are not logged in: loginctl enable-linger")
