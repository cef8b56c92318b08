"""Statements as each driver reads them."""

from __future__ import annotations

import re

from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters
from harvester.outbox.sql.insert import Style, rewritten
from harvester.outbox.tables import OutboxTable

QUERY = "SELECT %s, %b::text, '100%%', %t"
NAMED = "SELECT %(b)s, %(a)s, %(b)s LIKE '%%'"


def test_each_driver_has_its_own() -> None:
    assert rewritten(QUERY, Style.PSYCOPG) == QUERY
    assert rewritten(QUERY, Style.FORMAT) == "SELECT %s, %s::text, '100%%', %s"
    assert rewritten(QUERY, Style.DOLLAR) == "SELECT $1, $2::text, '100%', $3"


def test_names_are_numbered_as_they_are_given() -> None:
    assert rewritten(NAMED, Style.FORMAT, ["a", "b"]) == NAMED
    assert rewritten(NAMED, Style.DOLLAR, ["a", "b"]) == "SELECT $2, $1, $2 LIKE '%'"


def test_nothing_of_the_catalog_s_query_is_left() -> None:
    parameters = catalog_parameters(OutboxTable.parse("outbox"))
    dollar = rewritten(CATALOG_SQL, Style.DOLLAR, parameters)
    assert "%(" not in dollar
    assert "'(%s)'" in dollar  # for the server's format()
    assert set(re.findall(r"\$\d+", dollar)) == {f"${number}" for number in range(1, len(parameters) + 1)}
