"""A pooler that lends a backend for each transaction is refused before anything is marked."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest

from harvester.errors import DatabaseUnavailable, SchemaError
from harvester.outbox import connection
from harvester.outbox.connection import connect, is_pooled, lends_backends
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.pooler import transaction_pooler

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers


_SETTINGS = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"


def test_start_refuses_a_pooler_in_transaction_mode(scene: Scene) -> None:
    scene.add(("k", "1"))
    with (
        transaction_pooler(scene.dsn) as pooled,
        closing(psycopg.connect(pooled, autocommit=True, application_name="another")) as another,
    ):
        before = another.execute(_SETTINGS).fetchall()
        config = scene.config_file(data_source=pooled)
        done = run_cli("start", "-f", str(config), check=False)
        run_cli("doctor", "-f", str(config), check=False)
        assert another.execute(_SETTINGS).fetchall() == before, "settings of a session that others use, too"
    assert done.returncode == 65
    assert "a pooler in transaction (or statement) mode is between" in done.stderr
    assert "point data_source at PostgreSQL itself" in done.stderr
    assert "Traceback" not in done.stderr
    assert scene.term() == 0, "nobody has led"
    assert len(scene.left()) == 1


def test_what_is_told_apart(scene: Scene) -> None:
    with closing(connect(scene.dsn, application_name="test")) as direct:
        assert not is_pooled(direct)
        assert not lends_backends(direct, scene.dsn, "test")
    with (
        transaction_pooler(scene.dsn) as pooled,
        closing(connect(pooled, application_name="test", may_be_lent=True)) as lent,
    ):
        with pytest.raises(SchemaError, match="a pooler in transaction"):
            connect(pooled, application_name="test")
        assert is_pooled(lent)
        assert lends_backends(lent, pooled, "test")


def test_a_pool_that_has_no_session_left_lends_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its size is what the harvester needs: each of its sessions keeps one."""

    def none_left(*_: Any, **__: Any) -> Any:
        raise DatabaseUnavailable("timeout expired")

    with closing(connect(scene.dsn, application_name="test")) as direct:
        monkeypatch.setattr(connection, "connect", none_left)
        assert not lends_backends(direct, scene.dsn, "test")
