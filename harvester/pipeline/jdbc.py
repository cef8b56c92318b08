"""The configuration's data source, a string for libpq, as PostgreSQL's JDBC driver takes it.

A login never stands in the URL, which Spark shows in plans: Spark keeps the property `password` out of them.
Where the driver cannot keep what the string promises, it is refused instead of connecting in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from psycopg.pq import Conninfo

from harvester.config.dsn import parse_dsn
from harvester.errors import ConfigurationError, Problem

DRIVER = "org.postgresql.Driver"

# libpq's word → the driver's, where the values are the same.
_SAME = {
    "application_name": "ApplicationName",
    "channel_binding": "channelBinding",
    "connect_timeout": "connectTimeout",
    "gssencmode": "gssEncMode",
    "krbsrvname": "kerberosServerName",
    "options": "options",
    "password": "password",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslmode": "sslmode",
    "sslnegotiation": "sslNegotiation",
    "sslpassword": "sslpassword",
    "sslrootcert": "sslrootcert",
    "user": "user",
}
_FROM_LIBPQ = (
    "host", "hostaddr", "port", "dbname", "user", "password", "sslmode", "sslrootcert", "sslcert", "sslkey",
)  # fmt: skip
_NO_COUNTERPART = ("passfile", "require_auth", "requirepeer", "service", "sslcrl", "sslcrldir")
_JAVA_KEYS = (".der", ".p12", ".pfx", ".pk8")


@dataclass(frozen=True, slots=True)
class JdbcSource:
    """`properties` hold the login; they are left out of what `repr` shows."""

    url: str
    properties: Mapping[str, str] = field(repr=False)

    @property
    def options(self) -> dict[str, str]:
        """For a reader or writer of Spark's format `jdbc`, but for the table."""
        return {"url": self.url, "driver": DRIVER, **self.properties}


def jdbc_source(dsn: str, defaults: Mapping[str, str] | None = None) -> JdbcSource:
    """Read a connection string; what it leaves out is taken from `defaults`: those of libpq, so PG… in the environment.

    Raises ConfigurationError, with nothing of the string in it, for a broken one and for what the driver cannot do.
    """
    try:
        given = {name: value for name, value in parse_dsn(dsn).items() if value}
    except ValueError as error:
        raise _refused(str(error)) from None
    if known := [name for name in _NO_COUNTERPART if name in given]:
        raise _refused(f"has {', '.join(known)}, which PostgreSQL's JDBC driver does not know")
    found = {**(_libpq_defaults() if defaults is None else defaults), **given}
    if "host" in given and "hostaddr" not in given:
        found.pop("hostaddr", None)
    found |= _verified(found)
    properties = {theirs: found[ours] for ours, theirs in _SAME.items() if found.get(ours)}
    if found.get("sslrootcert") == "system":
        del properties["sslrootcert"]
        properties["sslfactory"] = "org.postgresql.ssl.DefaultJavaSSLFactory"
    # A standby would do for reading, but it may lag: what is judged has to be what was committed.
    attributes = found.get("target_session_attrs", "read-write")
    properties["targetServerType"] = "any" if attributes == "any" else "primary"
    if found.get("load_balance_hosts") == "random":
        properties["loadBalanceHosts"] = "true"
    database = found.get("dbname") or found.get("user", "")
    return JdbcSource(f"jdbc:postgresql://{_hosts(found)}/{quote(database, safe='')}", properties)


def _libpq_defaults() -> dict[str, str]:
    known = {one.keyword.decode(): one.val for one in Conninfo.get_defaults()}
    return {name: value.decode() for name in _FROM_LIBPQ if (value := known.get(name))}


def _hosts(found: Mapping[str, str]) -> str:
    address, name = found.get("hostaddr", ""), found.get("host", "")
    if address and name and found.get("sslmode") == "verify-full":
        raise _refused("has a hostaddr beside verify-full: PostgreSQL's JDBC driver would check that, not the host")
    hosts = (address or name).split(",")
    if not all(hosts) or any(host.startswith(("/", "@")) for host in hosts):
        raise _refused(
            "leads to a Unix socket, which PostgreSQL's JDBC driver cannot use", "a host, such as host=localhost"
        )
    ports = (found.get("port") or "5432").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    if len(ports) != len(hosts):
        raise _refused(f"names {len(ports)} ports for {len(hosts)} host(s)")
    return ",".join(
        f"{f'[{host}]' if ':' in host else host}:{port or 5432}" for host, port in zip(hosts, ports, strict=True)
    )


def _verified(found: Mapping[str, str]) -> dict[str, str]:
    """The mode of TLS that keeps what libpq would do."""
    if (key := found.get("sslkey")) and not key.endswith(_JAVA_KEYS):
        raise _refused(
            "has a PEM file as sslkey, which PostgreSQL's JDBC driver does not read", f"one of {', '.join(_JAVA_KEYS)}"
        )
    root, mode = found.get("sslrootcert"), found.get("sslmode")
    if root == "system":
        return {"sslmode": "verify-full"}
    # libpq checks the server's certificate under `require` too once a CA is named; the driver would not.
    return {"sslmode": "verify-ca"} if root and mode == "require" else {}


def _refused(message: str, allowed: str | None = None) -> ConfigurationError:
    return ConfigurationError([Problem("data_source", message, allowed)])
