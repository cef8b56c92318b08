"""The jars of broker and connectors: resolved once with Apache Ivy, checked, kept in a cache.

PySpark ships Ivy, so nothing has to be installed for it. The broker's own libraries come without a binding from slf4j
to log4j, and would say nothing at all about what goes wrong: the binding is resolved with them.

Jars from Maven Central, resolved once with the Apache Ivy that PySpark ships, and kept in a cache. A set of jars is a
directory in the cache. It appears all at once, by a rename, so that what is there is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
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


KAFKA_VERSION = "4.3.0"
_SCALA = "2.13"
_LOG4J_VERSION = "2.25.4"  # the one that this Kafka depends on

_IVY_FILE = f"""\
<ivy-module version="2.0">
  <info organisation="harvester" module="broker"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_{_SCALA}" rev="{KAFKA_VERSION}" conf="default->default"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{_LOG4J_VERSION}"
                conf="default->default"/>
  </dependencies>
</ivy-module>
"""


def broker_jars(*, progress: Callable[[str], None] = lambda _: None, timeout_s: float = 600.0) -> Path:
    """The directory with the broker's jars, and with nothing else; downloads them (44 MB) the first time.

    $HARVESTER_KAFKA_JARS names a directory of your own, such as the `libs` of an unpacked Kafka. Safe to call from
    several processes at once: one downloads, the others wait.
    """
    if given := os.environ.get("HARVESTER_KAFKA_JARS"):
        if not any(Path(given).glob("kafka_*.jar")):
            raise StackError(
                f"HARVESTER_KAFKA_JARS={given}: no Kafka broker there",
                hint="name the `libs` directory of an unpacked Apache Kafka, or unset it",
            )
        return Path(given).absolute()
    return cached(
        f"kafka-{KAFKA_VERSION}",
        _IVY_FILE,
        what="the Kafka broker",
        hints=(
            "pip install 'harvester[stack]', or name a broker of your own with --bootstrap",
            "it needs the network once; HARVESTER_KAFKA_JARS names jars you already have",
        ),
        check=_check,
        announce=lambda: progress(f"fetching Apache Kafka {KAFKA_VERSION} (44 MB, once)"),
        timeout_s=timeout_s,
    )


def parse_digests(text: str) -> dict[str, str]:
    """File name → SHA-256 in hex, from lines as `sha256sum` writes them."""
    return {name: digest for digest, name in (line.split() for line in text.splitlines() if line.strip())}


def wrong_files(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """What is wrong with a set of files, by name and in words; empty when they are the expected ones."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not expected" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has another digest" for name in sorted(expected.keys() & found.keys()) if found[name] != expected[name]
    ]
    return problems


def _check(directory: Path) -> None:
    expected = parse_digests(resources.files(__package__).joinpath("broker.sha256").read_text())
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in directory.iterdir()}
    if problems := wrong_files(found, expected):
        raise StackError("the Kafka broker that was fetched is not the expected one: " + "; ".join(problems))
