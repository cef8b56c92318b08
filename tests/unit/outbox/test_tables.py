"""Table names: what is read as one, and what is refused."""

from __future__ import annotations

import pytest

from harvester.errors import SchemaError
from harvester.outbox.tables import OutboxTable


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("outbox", None, "outbox"),
        ("Billing.OutBox", "billing", "outbox"),
        (' billing . "Out Box" ', "billing", "Out Box"),
        ('"My Schema"."the ""outbox"""', "My Schema", 'the "outbox"'),
        ('"a.b"', None, "a.b"),
        ("postfach_für_größe", None, "postfach_für_größe"),
        ("_o$1", None, "_o$1"),
    ],
)
def test_reads_names_as_sql_does(text: str, schema: str | None, name: str) -> None:
    assert OutboxTable.parse(text) == OutboxTable(schema=schema, name=name)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", ".a", "a..b", "a.b.c", "1a", "a b", "a-b", '"a', 'a"', '""', "a;", "a--",
        "outbox; DROP TABLE outbox", 'a"; DROP TABLE b; --', "$a", "'a'", '"a\x00b"',
    ],
)  # fmt: skip
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(SchemaError, match="is not a table name") as refused:
        OutboxTable.parse(text)
    assert refused.value.hint


def test_refuses_a_dot_at_the_end() -> None:
    with pytest.raises(SchemaError, match="is not a table name"):
        OutboxTable.parse("a.")


def test_folds_ascii_letters_only() -> None:
    assert OutboxTable.parse("ÄB").name == "Äb"


def test_leaves_room_for_the_longest_suffix() -> None:
    longest = "x" * (63 - len("_quarantine"))
    assert OutboxTable.parse(longest).name == longest
    with pytest.raises(SchemaError, match="too long"):
        OutboxTable.parse(longest + "x")
    with pytest.raises(SchemaError, match="too long"):
        OutboxTable.parse("ü" * 27)


def test_names_what_stands_beside_it() -> None:
    table = OutboxTable.parse('billing."out""box"')
    assert table.sql == str(table) == '"billing"."out""box"'
    assert table.term == '"billing"."out""box_term"'
    assert table.quarantine == '"billing"."out""box_quarantine"'
    assert table.archive == '"billing"."out""box_archive"'
    assert table.beside("archive_default") == '"billing"."out""box_archive_default"'


def test_a_name_beside_a_long_one_is_shortened_and_its_own() -> None:
    first, second = OutboxTable(None, "x" * 52), OutboxTable(None, "x" * 51 + "y")
    names = {table.beside(suffix) for table in (first, second) for suffix in ("archive_default", "archive_20260101")}
    assert len(names) == 4
    assert all(len(name.strip('"').encode()) <= 63 for name in names)


def test_channels_differ_between_tables() -> None:
    names = ["outbox", "a.outbox", "b.outbox", '"a.outbox"', '"OUTBOX"']
    assert len({OutboxTable.parse(name).channel for name in names}) == len(names)
