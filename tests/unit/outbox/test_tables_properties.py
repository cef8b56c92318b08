"""Any identifier survives quoting and reading; nothing ever escapes its quotes."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import SchemaError
from harvester.outbox.tables import OutboxTable

identifiers = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=["Cs"]), min_size=1).filter(
    lambda text: len(text.encode()) <= 52
)
QUOTED = re.compile(r'"(?:[^"\x00]|"")+"')


@given(schema=st.none() | identifiers, name=identifiers)
def test_quoted_names_read_back(schema: str | None, name: str) -> None:
    table = OutboxTable(schema=schema, name=name)
    assert OutboxTable.parse(table.sql) == table


@given(schema=st.none() | identifiers, name=identifiers)
def test_every_name_is_one_or_two_quoted_identifiers(schema: str | None, name: str) -> None:
    table = OutboxTable(schema=schema, name=name)
    parts = QUOTED.pattern if schema is None else rf"{QUOTED.pattern}\.{QUOTED.pattern}"
    for text in (table.sql, table.term, table.quarantine):
        assert re.fullmatch(parts, text)
    assert re.fullmatch(r"harvester_[0-9a-f]{16}", table.channel)


@given(st.text())
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        table = OutboxTable.parse(text)
    except SchemaError:
        return
    assert OutboxTable.parse(table.sql) == table
