"""Templates over the columns of a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import ConfigurationError, SchemaError
from harvester.outbox.sql import adoption, ddl
from harvester.outbox.sql.adoption import AdoptedTable, Route, Template
from harvester.outbox.tables import OutboxTable

OUTBOX = OutboxTable("public", "outbox")
COLUMNS = {"id": "uuid", "aggregatetype": "text", "aggregateid": "text", "type": "text", "payload": "jsonb"}
EVENTS = AdoptedTable(OutboxTable("public", "outboxevent"), "r", COLUMNS)
texts = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=["Cs"]), min_size=1)
plain = texts.filter(lambda text: not set(text) & set("{}"))


@given(st.lists(st.tuples(st.booleans(), plain), min_size=1))
def test_a_template_is_read_as_it_is_written(pieces: list[tuple[bool, str]]) -> None:
    text = "".join(f"{{{piece}}}" if is_column else piece for is_column, piece in pieces)
    template = Template.parse("topic", text)
    assert template.columns == {piece for is_column, piece in pieces if is_column}
    assert str(template) == text


@given(texts)
def test_any_text_is_a_template_or_refused(text: str) -> None:
    try:
        template = Template.parse("key", text)
    except ConfigurationError:
        assert set(text) & set("{}")
        return
    assert Template.parse("key", str(template)) == template


def test_braces() -> None:
    assert Template.parse("value", '{{"id": "{id}"}}').pieces == (
        (False, "{"),
        (False, '"id": "'),
        (True, "id"),
        (False, '"'),
        (False, "}"),
    )


@pytest.mark.parametrize("text", ["", "{", "}", "{}", "a{b", "a}b", "{a{b}}", "\x00"])
def test_what_is_no_template(text: str) -> None:
    with pytest.raises(ConfigurationError, match="topic"):
        Template.parse("topic", text)


def test_the_defaults_are_debezium_s() -> None:
    route = Route.parse()
    assert str(route) == "topic outbox.event.{aggregatetype}, key {aggregateid}, value {payload}, header id={id}"
    assert route.columns == {"aggregatetype", "aggregateid", "payload", "id"}
    assert Route.parse(key="").key is None
    with pytest.raises(ConfigurationError, match="header"):
        Route.parse(headers=["id"])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (AdoptedTable(OUTBOX, "r", COLUMNS), "the outbox itself"),
        (AdoptedTable(EVENTS.name, "v", COLUMNS), "not a table"),
        (AdoptedTable(EVENTS.name, "r", {"id": "uuid", "payload": "jsonb"}), "no column aggregateid, aggregatetype"),
    ],
)
def test_what_is_not_adopted(source: AdoptedTable, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        adoption.adopt(OUTBOX, ddl.new_columns("text"), source, Route.parse())


def test_two_tables_of_one_name_have_two_functions() -> None:
    other = AdoptedTable(OutboxTable("shop", "outboxevent"), "r", COLUMNS)
    made = {adoption.adopt(OUTBOX, ddl.new_columns("text"), table, Route.parse())[1] for table in (EVENTS, other)}
    assert len(made) == 2
