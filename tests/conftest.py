"""Fixtures for every test. Servers start when the first test asks for them; see tests/support/servers.py."""

from __future__ import annotations

import gc
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import settings

from tests.support import servers as support_servers
from tests.support.longs import some_of
from tests.support.servers import Run, Servers

if TYPE_CHECKING:
    from tests.support.databases import Admin
    from tests.support.topics import Topics

_run = pytest.StashKey[Run]()
_UNIT = Path(__file__).parent / "unit"


class MakeTopic(Protocol):
    """The fixture `make_topic`."""

    def __call__(self, partitions: int = 4, config: Mapping[str, str] | None = None) -> str: ...


# A busy machine makes any example slow once; what has to be quick is measured by benchmarks.
settings.register_profile("suite", deadline=None, max_examples=some_of(100))
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Only in the process that begins the run: workers inherit its environment."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; programs inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        config.stash[_run] = Run()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The workers have ended by now."""
    if run := config.stash.get(_run, None):
        run.end()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of modules and tests that stay: the collector is not to look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs servers, so that `-m 'not servers'` runs without any; order what several workers share."""
    for item in items:
        if "servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.servers)
    if (workers := getattr(config, "workerinput", {}).get("workercount", 1)) > 1:
        items[:] = _spread(items, workers)


def _spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker gets a stretch of the list, and steals from the ends of others when it has done its own.

    So each stretch ends with quick tests: nobody begins a long one when all others are through. The tests of a file
    stay together, since they share servers.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    quick = [path for path in files if path.is_relative_to(_UNIT)]
    if not quick:
        return items
    stretches: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for path in [*(path for path in files if path not in quick), *quick]:
        min(stretches, key=len).extend(files[path])
    return [item for stretch in stretches for item in stretch]


@pytest.fixture(scope="session")
def servers() -> Servers:
    """The run's PostgreSQL and Kafka."""
    return support_servers.start()


@pytest.fixture(scope="session")
def _template(servers: Servers) -> str:
    from tests.support.databases import ensure_template

    return ensure_template(servers)


@pytest.fixture(scope="session")
def _admin(servers: Servers) -> Iterator[Admin]:
    """A session in which databases are made and dropped."""
    import psycopg

    with psycopg.connect(servers.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def empty_database(servers: Servers, _admin: Admin) -> Iterator[str]:
    """DSN of an empty database."""
    from tests.support.databases import fresh_database

    with fresh_database(servers, "template0", _admin) as dsn:
        yield dsn


@pytest.fixture
def make_database(servers: Servers, _template: str, _admin: Admin) -> Iterator[Callable[[], str]]:
    """Makes databases that have an outbox, each an outbox of its own; returns the DSN."""
    from contextlib import ExitStack

    from tests.support.databases import fresh_database, make_its_own

    with ExitStack() as cleanup:

        def make() -> str:
            dsn = cleanup.enter_context(fresh_database(servers, _template, _admin))
            make_its_own(dsn)
            return dsn

        yield make


@pytest.fixture
def database(make_database: Callable[[], str]) -> str:
    """DSN of a database with the default outbox in it."""
    return make_database()


@pytest.fixture(scope="session")
def _topics(servers: Servers) -> Topics:
    from tests.support.topics import Topics

    return Topics(servers)


@pytest.fixture
def make_topic(_topics: Topics) -> Iterator[MakeTopic]:
    """Makes topics; returns the name."""
    made: list[str] = []

    def make(partitions: int = 4, config: Mapping[str, str] | None = None) -> str:
        made.append(_topics.make(partitions, config))
        return made[-1]

    yield make
    _topics.remove(made)


@pytest.fixture
def topic(make_topic: MakeTopic) -> str:
    """Name of a topic with 4 partitions."""
    return make_topic()


@pytest.fixture
def group() -> str:
    """A leader group id that nobody else uses."""
    return f"test-group-{uuid.uuid4().hex[:12]}"
