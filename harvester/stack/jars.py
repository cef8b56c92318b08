"""The broker's jars: resolved once with Apache Ivy, checked against their known digests, kept in a cache.

PySpark ships Ivy, so nothing has to be installed for it. The broker's own libraries come without a binding from
slf4j to log4j, and would say nothing at all about what goes wrong: the binding is resolved with them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from harvester.errors import StackError
from harvester.stack import ivy

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
    return ivy.cached(
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
