"""Converts the configuration's data source, a libpq connection string, for PostgreSQL's JDBC driver.

The URL never contains a login, because Spark shows URLs in plans; it hides the property `password`. A string that the
driver cannot honour is refused, rather than connecting in a different way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from psycopg.pq import Conninfo

from harvester.config.dsn import parse_dsn
from harvester.errors import ConfigurationError, Problem

DRIVER = "org.postgresql.Driver"

# libpq's name → the driver's, for parameters whose values are the same.
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
    """A URL and its `properties`, which contain the login and are hidden from `repr`."""

    url: str
    properties: Mapping[str, str] = field(repr=False)

    @property
    def options(self) -> dict[str, str]:
        """All options of Spark's format `jdbc` except the table."""
        return {"url": self.url, "driver": DRIVER, **self.properties}


def jdbc_source(dsn: str, defaults: Mapping[str, str] | None = None) -> JdbcSource:
    """Converts a connection string. `defaults`: for missing parameters; None: libpq's, including PG… variables.

    Raises ConfigurationError, which does not quote the string, if it is invalid or the driver cannot honour it.
    """
    try:
        given = {name: value for name, value in parse_dsn(dsn).items() if value}
    except ValueError as error:
        raise _refused(str(error)) from None
    if known := [name for name in _NO_COUNTERPART if name in given]:
        raise _refused(f"has {', '.join(known)}, which PostgreSQL's JDBC driver does not support")
    found = {**(_libpq_defaults() if defaults is None else defaults), **given}
    if "host" in given and "hostaddr" not in given:
        found.pop("hostaddr", None)
    found |= _verified(found)
    properties = {theirs: found[ours] for ours, theirs in _SAME.items() if found.get(ours)}
    if found.get("sslrootcert") == "system":
        del properties["sslrootcert"]
        properties["sslfactory"] = "org.postgresql.ssl.DefaultJavaSSLFactory"
    # Reading would also work on a standby, but that may lag behind what was committed.
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
        raise _refused("has hostaddr and verify-full: PostgreSQL's JDBC driver would verify the address, not the host")
    hosts = (address or name).split(",")
    if not all(hosts) or any(host.startswith(("/", "@")) for host in hosts):
        raise _refused(
            "uses a Unix socket, which PostgreSQL's JDBC driver does not support", "a host, such as host=localhost"
        )
    ports = (found.get("port") or "5432").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    if len(ports) != len(hosts):
        raise _refused(f"names {len(ports)} ports for {len(hosts)} host(s)")
    return ",".join(
        f"{f'[{host}]' if ':' in host else host}:{port or 5432}" for host, port in zip(hosts, ports, strict=True)
    )


def _verified(found: Mapping[str, str]) -> dict[str, str]:
    """The `sslmode` with which the driver verifies what libpq would."""
    if (key := found.get("sslkey")) and not key.endswith(_JAVA_KEYS):
        raise _refused(
            "has a PEM file as sslkey, which PostgreSQL's JDBC driver cannot read", f"one of {', '.join(_JAVA_KEYS)}"
        )
    root, mode = found.get("sslrootcert"), found.get("sslmode")
    if root == "system":
        return {"sslmode": "verify-full"}
    # If a CA is given, libpq verifies the server's certificate under `require` too; the driver does not.
    return {"sslmode": "verify-ca"} if root and mode == "require" else {}


def _refused(message: str, allowed: str | None = None) -> ConfigurationError:
    return ConfigurationError([Problem("data_source", message, allowed)])
