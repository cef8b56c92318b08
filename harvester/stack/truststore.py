"""A Java trust store made from the machine's own list of certificates.

A Java runtime that comes in a wheel trusts only the authorities it was built with, not those that the machine's
administrator added, and a machine without Java has no store for it to read either. What every Linux has is a PEM
bundle; Java reads the JKS format (`sun.security.provider.JavaKeyStore` documents it), which is quickly written.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import struct
from collections.abc import Sequence
from pathlib import Path

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
