"""No call of a shard's database session waits for ever for a server that says nothing."""

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester.outbox import purge_session
from harvester.outbox.purge_session import PurgeSession, Rules
from harvester.record import RowVersions
from tests.support.marking import TABLE
from tests.support.proxy import Proxy

pytestmark = pytest.mark.servers

ROW = RowVersions((1,), (800,), (0,))


@pytest.mark.parametrize("purged_before", [True, False], ids=["later purge", "first purge"])
def test_a_purge_ends_when_the_server_goes_silent(
    database: str, monkeypatch: pytest.MonkeyPatch, purged_before: bool
) -> None:
    """The first one of a connection prepares its statement before; that must be bounded, too."""
    monkeypatch.setattr(purge_session, "_SILENCE_S", 1.0)
    place = conninfo_to_dict(database)
    with Proxy(f"{place['host']}:{place['port']}") as link:
        link.open()
        dsn = make_conninfo(database, host="127.0.0.1", hostaddr="127.0.0.1", port=link.port)
        session = PurgeSession(dsn, TABLE, "test", Rules(), opened=lambda *_: None, server_changed=pytest.fail)
        session.ready()
        if purged_before:
            session.delete(ROW)
        link.deafen()
        raised: list[Exception] = []

        def purge() -> None:
            try:
                session.delete(ROW)
            except psycopg.Error as error:
                raised.append(error)

        thread = threading.Thread(target=purge, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(raised[0], psycopg.OperationalError)
