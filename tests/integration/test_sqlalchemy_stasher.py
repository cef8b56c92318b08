"""What is particular to SQLAlchemy: flushes, scoped sessions, engines that commit by themselves."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from harvester.errors import NoTransaction, OutboxError
from harvester.record import OutboxRecord
from harvester.writers.sqlalchemy import SqlalchemyStasher
from tests.support.desks import engine_of

pytestmark = pytest.mark.servers

RECORD = OutboxRecord("t", "k", "v")


class Base(DeclarativeBase):
    """Of the models."""


class Account(Base):
    """Something that a record announces."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


def waiting(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


def test_what_is_pending_is_written_before_the_record(database: str) -> None:
    """Otherwise a record would take its id before the locks on what it announces."""
    engine = engine_of(database, "psycopg")
    Base.metadata.create_all(engine)
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: said.append(given[2].split()[0]))
    with Session(engine) as session, session.begin():
        session.add(Account(id=42, balance=10))
    with Session(engine, autoflush=False) as session, session.begin():
        session.get_one(Account, 42).balance -= 5
        SqlalchemyStasher().stash(session, RECORD)
    engine.dispose()
    assert [word for word in said if word in ("UPDATE", "INSERT")][-2:] == ["UPDATE", "INSERT"]
    assert waiting(database) == 1


def test_scoped_sessions(database: str) -> None:
    engine = engine_of(database, "psycopg")
    sessions = scoped_session(sessionmaker(engine))
    SqlalchemyStasher().stash(sessions, RECORD)
    sessions.rollback()
    SqlalchemyStasher().stash_many(sessions, [RECORD] * 2)
    sessions.commit()
    sessions.remove()
    engine.dispose()
    assert waiting(database) == 2


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_engine_that_commits_by_itself_is_refused(database: str, driver: str) -> None:
    engine = engine_of(database, driver).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(NoTransaction):
        SqlalchemyStasher().stash(connection, RECORD)
    engine.dispose()
    assert waiting(database) == 0


def test_an_error_of_the_server_is_sqlalchemy_s(database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("ALTER TABLE outbox ADD CHECK (kafka_key <> 'bad')")
    engine = engine_of(database, "psycopg")
    with Session(engine) as session, pytest.raises(sqlalchemy.exc.IntegrityError):
        SqlalchemyStasher().stash(session, OutboxRecord("t", "bad"))
    engine.dispose()


def test_other_databases_and_other_things() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(OutboxError, match=r"sqlite\+pysqlite"):
        SqlalchemyStasher().stash(connection, RECORD)
    engine.dispose()
    target: Any = engine
    with pytest.raises(TypeError, match="not Engine"):
        SqlalchemyStasher().stash(target, RECORD)
