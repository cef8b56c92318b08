"""Every example and every command of docs/writing.md runs."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from tests.support import django_desk
from tests.support.cli import run_cli
from tests.support.desks import asyncpg_options
from tests.support.outboxes import poor_role

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- test: (\w+) -->\n```(?:python|sql)\n(.*?)^```", PAGE, re.M | re.S))
COMMANDS = [line[2:].split("   #")[0].strip() for line in re.findall(r"^\$ .*$", PAGE, re.M)]


@pytest.fixture
def shop(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE account (id int, balance int)")
        connection.execute("INSERT INTO account VALUES (42, 100)")
        yield connection


def outcome(shop: psycopg.Connection[Any]) -> tuple[int, list[tuple[Any, ...]]]:
    """The balance, and what was written."""
    balance = shop.execute("SELECT balance FROM account").fetchone()
    assert balance is not None
    rows = shop.execute("SELECT kafka_topic, kafka_key, kafka_value FROM outbox ORDER BY id").fetchall()
    return balance[0], rows


def paid(amount: int) -> tuple[str, str, str]:
    return "billing.paid", "42", f'{{"amount": {amount}}}'


def run(name: str, **given: Any) -> dict[str, Any]:
    exec(compile(EXAMPLES[name], "writing.md", "exec"), given)
    return given


def test_every_example_is_run_here() -> None:
    assert PAGE.count("```python") + PAGE.count("```sql") == len(EXAMPLES) == 9
    tested = set(re.findall(r'run\("(\w+)"|EXAMPLES\["(\w+)"\]', Path(__file__).read_text()))
    assert {first or second for first, second in tested} >= set(EXAMPLES)


def test_the_extras_exist() -> None:
    named = set(re.findall(r"^\|.*\| `([a-z-]+)` \|", PAGE, re.M))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named == set(declared) - {"arrow", "aws", "dev", "goharvest", "http", "otel", "s3", "spark", "stack"}


@pytest.fixture
def at_this_place(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = conninfo_to_dict(database)
    place = f"{options['user']}@{options['host']}:{options['port']}/{options['dbname']}"
    for name in ("sqlalchemy", "leases"):
        monkeypatch.setitem(EXAMPLES, name, EXAMPLES[name].replace("app@db/shop", place))


@pytest.mark.usefixtures("at_this_place")
def test_sqlalchemy(shop: psycopg.Connection[Any]) -> None:
    run("sqlalchemy")["engine"].dispose()
    assert outcome(shop) == (95, [paid(5), paid(7)])


@pytest.mark.usefixtures("at_this_place")
def test_leases(shop: psycopg.Connection[Any]) -> None:
    run("leases")["engine"].dispose()
    assert outcome(shop) == (100, [paid(5)])
    found = shop.execute("SELECT name, sequence, upstream_position FROM outbox_lease").fetchone()
    assert found == ("orders-reader", 1, "offset 7")


def test_django(shop: psycopg.Connection[Any], database: str) -> None:
    assert set(run("settings")["INSTALLED_APPS"]) <= set(settings.INSTALLED_APPS)
    with django_desk.database(database, "default"):
        run("django")
    assert outcome(shop) == (95, [paid(5)])


def test_asyncpg(shop: psycopg.Connection[Any], database: str) -> None:
    async def use() -> None:
        async with asyncpg.create_pool(**asyncpg_options(database), min_size=1, max_size=1) as pool:
            await run("asyncpg")["pay"](pool)

    asyncio.run(use())
    assert outcome(shop) == (95, [paid(5)])


def test_serialisers() -> None:
    record = run("serialisers")["record"]
    assert (record.topic, record.key, record.value) == ("orders", "customer-42", '{"total":99}')
    assert dict(record.headers)["ce_type"] == "shop.order.paid"


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    code = EXAMPLES["registry"].replace("SchemaRegistryClient({", "SchemaRegistryClient.new_client({")
    monkeypatch.setitem(EXAMPLES, "registry", code.replace("http://registry:8081", "mock://page"))
    assert run("registry")["record"].value.startswith(b"\x00")


def test_the_commands_and_the_function(shop: psycopg.Connection[Any], database: str) -> None:
    shop.execute("CREATE TABLE outboxevent (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)")
    shop.execute("CREATE SCHEMA shop CREATE TABLE events (kind text, customer_id int, body text, trace_id text)")
    assert len(COMMANDS) == 4
    with poor_role(database, "GRANT UPDATE, SELECT ON account TO {role}") as poor:
        name = str(conninfo_to_dict(poor)["user"])
        for command in COMMANDS:
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command)][1:]
            words = [name if word == "app" else word for word in words]
            printed = run_cli(*words, "--set", f"data_source={database}").stdout
            if words[0] == "grants":
                shop.execute(printed.encode())
        with psycopg.connect(poor, autocommit=True) as app:
            app.execute(EXAMPLES["function"].encode())
            app.execute(EXAMPLES["leased_function"].encode())
    shop.execute("INSERT INTO shop.events VALUES ('sale', 7, 'body', 'x')")
    shop.execute("INSERT INTO outboxevent VALUES (NULL, 'order', '7', 'paid', '{}')")
    balance, rows = outcome(shop)
    assert balance == 95
    assert rows == [
        paid(5),
        ("billing.paid", "42", None),
        paid(5),
        ("shop.sale", "7", "body"),
        ("outbox.event.order", "7", "{}"),
    ]
