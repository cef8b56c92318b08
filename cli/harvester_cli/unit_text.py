"""The text of the systemd units: the shipped ones, with this installation's paths, for the system or for a user. Pure.

A user's manager has no privileges: it can make no users, namespaces or mounts, and knows no units of the system. What
needs them is left out there; what the kernel's filters do stays.
"""

from __future__ import annotations

import re

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
    """Whether a path needs no quoting: blanks, quotes, `$` and `%` mean something in a unit."""
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
    """A block without what is not for users; a comment goes with the setting below it."""
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
