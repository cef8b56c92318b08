"""A throw-away certificate authority, and servers that speak TLS and ask for passwords."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from psycopg import sql
from psycopg.conninfo import make_conninfo

from harvester import stack
from harvester.outbox import schema
from harvester.outbox.sql.grants import GrantTarget, script
from harvester.outbox.tables import OutboxTable
from harvester.stack import kafka as stack_kafka
from harvester.stack.stack import free_ports

from .brokers import another_listener
from .servers import FAST
from .wait import eventually

TABLE = OutboxTable.parse("outbox")
_TRUST_THE_ADMINISTRATOR = """\
local   all all                    trust
host    all postgres 127.0.0.1/32  trust
hostssl all all      127.0.0.1/32  scram-sha-256
"""


class Authority:
    """Signs certificates for 127.0.0.1; everything is a PEM file in `directory`."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory, self.certificate, self._key = directory, directory / f"{name}.pem", directory / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN=throw-away {name}",
                 "-keyout", str(self._key), "-out", str(self.certificate))  # fmt: skip

    def issue(self, name: str, password: str | None = None) -> tuple[Path, Path]:
        """(certificate, key); the key is encrypted when there is a password."""
        plain, key, certificate = (self.directory / f"{name}.{end}" for end in ("plain", "key", "pem"))
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(plain), "-out",
                 str(request))  # fmt: skip
        _openssl("x509", "-req", "-days", "2", "-in", str(request), "-CA", str(self.certificate), "-CAkey",
                 str(self._key), "-CAcreateserial", "-extfile", str(extensions), "-out", str(certificate))  # fmt: skip
        if password is None:
            return certificate, plain
        # Through a file: what stands in an argument is seen in the list of processes.
        secret = self.directory / f"{name}.secret"
        secret.write_text(password)
        _openssl("pkcs8", "-topk8", "-in", str(plain), "-out", str(key), "-v2", "aes256", "-passout", f"file:{secret}")
        plain.unlink()
        secret.unlink()
        return certificate, key


@dataclass(frozen=True)
class Login:
    """Who logs in to both servers, and with what."""

    user: str
    database_password: str
    kafka_password: str
    key_password: str


@dataclass(frozen=True)
class SecureServers:
    """PostgreSQL with `sslmode=verify-full` and a broker with SASL_SSL, SCRAM-SHA-512 and client certificates.

    `admin_dsn` and `admin_bootstrap` are open doors for the test itself.
    """

    admin_dsn: str
    admin_bootstrap: str
    dsn: str
    bootstrap: str
    ca: Path
    other_ca: Path
    client_certificate: Path
    client_key: Path
    login: Login

    def data_source(self, **given: str) -> str:
        parameters = {
            "user": self.login.user,
            "password": self.login.database_password,
            "sslmode": "verify-full",
            "sslrootcert": str(self.ca),
        }
        return make_conninfo(self.dsn, **(parameters | given))

    def kafka(self, **given: str) -> dict[str, str]:
        """Options for a client; names with underscores for dots."""
        options = {
            "bootstrap.servers": self.bootstrap,
            "broker.address.family": "v4",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": self.login.user,
            "sasl.password": self.login.kafka_password,
            "ssl.ca.location": str(self.ca),
            "ssl.certificate.location": str(self.client_certificate),
            "ssl.key.location": str(self.client_key),
            "ssl.key.password": self.login.key_password,
        }
        return options | {name.replace("_", "."): value for name, value in given.items()}


@contextmanager
def secure_servers(directory: Path, login: Login) -> Iterator[SecureServers]:
    """Skips the test where no PostgreSQL with TLS is installed (the wheel's has none)."""
    programs = _programs_with_tls()
    if programs is None:
        pytest.skip("no PostgreSQL with TLS is installed")
    authority, other = Authority(directory), Authority(directory, "other")
    server_certificate, server_key = authority.issue("server")
    client_certificate, client_key = authority.issue("client", login.key_password)
    tls = {"cert": server_certificate, "key": server_key, "ca": authority.certificate}
    place, (port,) = directory / "stack", free_ports(1, [])
    try:
        with another_listener("SECURE", port, "SASL_SSL", _listener_settings(tls), _RIGHTS):
            info = stack.up(place, replace(FAST, postgres_bin=programs))
        _speak_tls(info.dsn, tls)
        _make_login(info.dsn, info.bootstrap, login)
        yield SecureServers(
            admin_dsn=info.dsn,
            admin_bootstrap=info.bootstrap,
            dsn=info.dsn,
            bootstrap=stack_kafka.bootstrap(port),
            ca=authority.certificate,
            other_ca=other.certificate,
            client_certificate=client_certificate,
            client_key=client_key,
            login=login,
        )
    finally:
        stack.down(place, delete=True)


_RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # the administrator, and the broker itself
    "allow.everyone.if.no.acl.found": "true",
}


def _listener_settings(tls: Mapping[str, Path]) -> dict[str, str]:
    """SCRAM-SHA-512 and client certificates. Files go in as text, which saves making Java's kinds of store of them."""
    pem = {which: file.read_text().strip().replace("\n", "\\n") for which, file in tls.items()}
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": pem["cert"],
        "ssl.keystore.key": pem["key"],
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": pem["ca"],
        "ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "scram-sha-512.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
    }


def _speak_tls(dsn: str, tls: Mapping[str, Path]) -> None:
    """The files are copied: the key must belong to the server's account, and nobody else may read it."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        row = admin.execute("SHOW data_directory").fetchone()
        assert row is not None
        data = Path(row[0])
        for which, source in tls.items():
            copy = data / f"{which}.pem"
            copy.touch(mode=0o600)
            copy.write_bytes(source.read_bytes())
            os.chown(copy, data.stat().st_uid, data.stat().st_gid)
            admin.execute(f"ALTER SYSTEM SET ssl_{which}_file = '{copy.name}'".encode())
        admin.execute("ALTER SYSTEM SET ssl = on")
        admin.execute("SELECT pg_reload_conf()")
        eventually(lambda: admin.execute("SHOW ssl").fetchone() == ("on",), what="TLS")


def _make_login(dsn: str, bootstrap: str, login: Login) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        schema.init(admin, TABLE)
        name = sql.Identifier(login.user)
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(name, login.database_password))
        admin.execute(script(GrantTarget.of(TABLE, schema.read_facts(admin, TABLE)), relays=[login.user]).encode())
        row = admin.execute("SHOW hba_file").fetchone()
        assert row is not None
        Path(row[0]).write_text(_TRUST_THE_ADMINISTRATOR)
        admin.execute("SELECT pg_reload_conf()")
    set_kafka_password(bootstrap, login.user, login.kafka_password)


def set_kafka_password(bootstrap: str, user: str, password: str) -> None:
    """For SCRAM-SHA-512; of a user that there is or not."""
    client = AdminClient({"bootstrap.servers": bootstrap, "broker.address.family": "v4"})
    credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    change = UserScramCredentialUpsertion(user, credentials, password.encode())
    for done in client.alter_user_scram_credentials([change]).values():
        done.result(timeout=30)


def _programs_with_tls() -> Path | None:
    for postgres in sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True):
        if b"libssl" in postgres.read_bytes():
            return postgres.parent
    return None


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
