"""Jars from Maven Central, resolved once with the Apache Ivy that PySpark ships, and kept in a cache.

A set of jars is a directory in the cache. It appears all at once, by a rename, so that what is there is complete.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from harvester.errors import StackError
from harvester.stack import java
from harvester.stack.processes import run


def cache_directory() -> Path:
    """`harvester` in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "harvester"


def cached(
    name: str,
    module: str,
    *,
    what: str,
    hints: tuple[str, str],
    check: Callable[[Path], None] = lambda _: None,
    announce: Callable[[], None] = lambda: None,
    timeout_s: float = 600.0,
) -> Path:
    """The directory `name` of the cache; resolves `module`, the text of an Ivy file, where it is not there yet.

    `what` names the jars in errors; `hints` say what to do without Ivy, and without the network. `check` raises if
    what was fetched is not what was expected; nothing is kept then. Safe to call from several processes at once:
    one downloads, the others wait.
    """
    cache = cache_directory()
    home = cache / name
    if home.is_dir():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StackError(
            f"cannot use the cache directory {cache}: {error.strerror}", hint="set XDG_CACHE_HOME"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not home.is_dir():
            announce()
            _resolve(home, module, what, hints, check, timeout_s)
    finally:
        os.close(handle)
    return home


def _ivy_jar(what: str, hint: str) -> Path:
    # Found without importing: importing pyspark takes half a second and starts nothing we need.
    found = importlib.util.find_spec("pyspark")
    if found is not None and found.origin is not None:
        for jar in sorted((Path(found.origin).parent / "jars").glob("ivy-*.jar")):
            return jar
    raise StackError(f"Apache Ivy, which fetches {what}, is not installed", hint=hint)


def _resolve(
    home: Path, module: str, what: str, hints: tuple[str, str], check: Callable[[Path], None], timeout_s: float
) -> None:
    ivy, runtime = _ivy_jar(what, hints[0]), java.find()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".fetch-") as scratch:
        work = Path(scratch)
        (work / "ivy.xml").write_text(module)
        command = [
            str(runtime.program),
            *java.trust_options(runtime, work),
            "-jar",
            str(ivy),
            *("-ivy", str(work / "ivy.xml")),
            *("-cache", str(work / "cache")),
            *("-retrieve", str(work / "jars" / "[artifact]-[revision](-[classifier]).[ext]")),
            *("-confs", "default"),
            *("-types", "jar", "bundle"),
        ]
        try:
            run(command, what=f"fetching {what}", timeout_s=timeout_s)
        except StackError as error:
            raise StackError(error.message, hint=hints[1]) from error
        check(work / "jars")
        shutil.move(work / "jars", home)  # a rename: the same file system
