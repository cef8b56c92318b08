"""Plain values as TOML: tables, text, numbers, booleans. The standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_]+")
_DELETE = "\x7f"  # the one character that JSON leaves as it is and TOML refuses


def to_toml(settings: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """One level of tables. `comments` stand at the top, one line each."""
    lines = [f"# {_one_line(comment)}" for comment in comments]
    if lines:
        lines.append("")
    lines += [assignment(name, value) for name, value in settings.items() if not isinstance(value, Mapping)]
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{name}]", *(assignment(inner, given) for inner, given in value.items())]
    return "\n".join(lines) + "\n"


def assignment(name: str, value: str | int | float | bool) -> str:
    """`name = value`; a name with dots is quoted."""
    shown = name if _BARE.fullmatch(name) else json.dumps(name)
    return f"{shown} = {json.dumps(value, ensure_ascii=False)}".replace(_DELETE, r"\u007f")


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split())
