"""Conversion of key, value and headers between the column types of an outbox and what Kafka gets (pure).

Values that are not text are cast to it: a JSON document, a UUID or a number is published in PostgreSQL's text form.
Headers are in two arrays, or in one column `kafka_headers`: a JSON object, or an array of alternating names and values
(flat, or pairs in two dimensions). An object or such an array is converted into two arrays, so that the relay sees no
difference.

No row may fail a statement. Headers that are neither an object nor pairs become one value without a name, their text: a
shard refuses that, the quarantine keeps it, and `stored` turns it back into what it was.

If the columns have the types of a new outbox, every expression is just the column's name and costs nothing.
"""

from __future__ import annotations

from harvester.outbox.shape import ColumnShape, HeaderKind
from harvester.outbox.tables import OutboxTable

_EMPTY = "'{}'::text[]"


def key(shape: ColumnShape, row: str) -> str:
    """The key of a row, of the shape's `key_type`; `row` is the row's name."""
    return f"{row}.kafka_key{'::text' if shape.key_stored else ''}"


def value(shape: ColumnShape, row: str) -> str:
    """The value of a row, of the shape's `value_type`."""
    return f"{row}.kafka_value{'::text' if shape.value_stored else ''}"


def header_keys(shape: ColumnShape, row: str) -> str:
    """The names of a row's headers, as text[]."""
    return f"{row}.kafka_header_keys" if shape.headers == "arrays" else names_in(shape.headers, f"{row}.kafka_headers")


def header_values(shape: ColumnShape, row: str) -> str:
    """The values of a row's headers, as text[]."""
    return (
        f"{row}.kafka_header_values" if shape.headers == "arrays" else values_in(shape.headers, f"{row}.kafka_headers")
    )


def names_in(kind: HeaderKind, headers: str) -> str:
    """The names, as text[], of the headers in one column."""
    return _side(kind, headers, "key", 1, _EMPTY)


def values_in(kind: HeaderKind, headers: str) -> str:
    """The values, as text[], of the headers in one column."""
    return _side(kind, headers, "value", 0, f"ARRAY[{headers}::text]")


def _side(kind: HeaderKind, headers: str, side: str, parity: int, otherwise: str) -> str:
    """`parity`: that of the side's positions in an array of pairs, counted from 1."""
    if kind == "pairs":
        return (
            f"CASE WHEN coalesce(array_ndims({headers}), 1) = 1"
            f" OR array_ndims({headers}) = 2 AND array_length({headers}, 2) = 2"
            f" THEN ARRAY(SELECT h.item::text FROM unnest({headers}) WITH ORDINALITY AS h(item, n)"
            f" WHERE h.n & 1 = {parity} ORDER BY h.n) ELSE {otherwise} END"
        )
    unreadable = f" WHEN {_unreadable(headers)} THEN {otherwise}" if kind == "json" else ""
    return (
        f"CASE WHEN {headers} IS NULL OR {kind}_typeof({headers}) = 'null' THEN {_EMPTY}{unreadable}"
        f" WHEN {kind}_typeof({headers}) = 'object' THEN ARRAY(SELECT h.{side} FROM {kind}_each_text({headers})"
        f" WITH ORDINALITY AS h(key, value, n) ORDER BY h.n) ELSE {otherwise} END"
    )


def _unreadable(headers: str) -> str:
    """SQL that is true if a json document has an escape that stands for no character of the database.

    PostgreSQL does not check the escapes of json. Such are a zero, half of a surrogate pair, and in an encoding other
    than UTF-8 anything but ASCII.
    """
    text, escape = f"{headers}::text", r"\\\\u"
    pair = rf"{escape}[dD][89abAB]..{escape}[dD][c-fC-F].."
    return (
        rf"position(E'\\u' IN {text}) > 0 AND CASE WHEN getdatabaseencoding() = 'UTF8'"
        rf" THEN regexp_replace({text}, E'\\\\\\\\|{pair}', '', 'g') ~ E'{escape}(0000|[dD][89a-fA-F])'"
        rf" ELSE regexp_replace({text}, E'\\\\\\\\', '', 'g') ~ E'{escape}(0000|(?!00[0-7]))' END"
    )


def published(table: OutboxTable, shape: ColumnShape) -> str:
    """The outbox as a FROM item: its rows with key, value and header arrays as Kafka gets them."""
    if not shape.key_stored and not shape.value_stored and shape.headers == "arrays":
        return table.sql
    partition = ", t.kafka_partition" if shape.has_partition else ""
    return (
        f"(SELECT t.id, t.create_time, t.kafka_topic, {key(shape, 't')} AS kafka_key,"
        f" {value(shape, 't')} AS kafka_value, {header_keys(shape, 't')} AS kafka_header_keys,"
        f" {header_values(shape, 't')} AS kafka_header_values{partition} FROM {table.sql} t)"
    )


def written(shape: ColumnShape) -> str:
    """The columns of an INSERT for the values of `stored`, in its order."""
    headers = "kafka_header_keys, kafka_header_values" if shape.headers == "arrays" else "kafka_headers"
    return f"kafka_key, kafka_value, {headers}"


def stored(shape: ColumnShape, key: str, value: str, names: str, values: str, *, unpaired: bool = False) -> str:
    """Convert these expressions, given as Kafka gets them, to the column types.

    `unpaired`: names and values may come from headers that were neither an object nor pairs; these are restored.
    """
    key, value = _cast(key, shape.key_stored), _cast(value, shape.value_stored)
    return f"{key}, {value}, {_stored_headers(shape, names, values, unpaired=unpaired)}"


def _cast(expression: str, kind: str | None) -> str:
    return f"({expression})::{kind}" if kind else expression


def _stored_headers(shape: ColumnShape, names: str, values: str, *, unpaired: bool) -> str:
    if shape.headers == "arrays":
        return f"{names}, {values}"
    if shape.headers == "pairs":
        kind = "text[]"
        joined = (
            "ARRAY(SELECT h.item FROM"
            f" (SELECT u.item, 2 * u.n - 1 FROM unnest({names}) WITH ORDINALITY AS u(item, n) UNION ALL"
            f" SELECT u.item, 2 * u.n FROM unnest({values}) WITH ORDINALITY AS u(item, n)) AS h(item, n) ORDER BY h.n)"
        )
    else:
        kind, joined = shape.headers, f"{shape.headers}_object({names}, {values})"
    if not unpaired:
        return joined
    return (
        f"CASE WHEN coalesce(cardinality({names}), 0) = 0 AND cardinality({values}) = 1"
        f" THEN ({values})[1]::{kind} ELSE {joined} END"
    )
