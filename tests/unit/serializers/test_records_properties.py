"""CloudEvents' headers for any attributes."""

from __future__ import annotations

import re
from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import RecordRejected
from harvester.outbox.sql.ddl import new_columns
from harvester.outbox.validation import check
from harvester.record import OutboxRecord
from harvester.serializers.records import cloud_event_headers, uri_reference

# RFC 3986: unreserved, reserved, and percent-encoded octets.
URI = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
texts = st.text(st.characters(blacklist_categories=["Cs"]))


@given(texts)
def test_a_reference_has_only_what_may_stand_in_one(text: str) -> None:
    encoded = uri_reference(text)
    assert URI.fullmatch(encoded)
    assert encoded.count("#") <= 1
    assert uri_reference(encoded) == encoded
    assert unquote(encoded) == unquote(text)


@given(st.text(), st.text(), st.text(), st.dictionaries(st.text(), st.text()))
def test_attributes_are_refused_or_can_be_stored(id_: str, source: str, type_: str, extensions: dict[str, str]) -> None:
    try:
        headers = cloud_event_headers(id=id_, source=source, type=type_, extensions=extensions)
    except RecordRejected:
        return
    check(OutboxRecord("t", "k", None, headers), new_columns("text"))
    found = dict(headers)
    assert (found["ce_id"], found["ce_type"]) == (id_, type_)
    assert {name: found[f"ce_{name}"] for name in extensions} == extensions
