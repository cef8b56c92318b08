"""Data sources: read, completed, masked, and refused without repeating them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from harvester.config.dsn import effective_dsn, mask_dsn, parse_dsn
from harvester.config.kafka_options import MASK


def test_the_default_data_source_means_what_it_says() -> None:
    # libpq by itself reads the password "dbname=postgres" and no database here
    seed = "host=localhost port=5432 user=postgres password= dbname=app sslmode=disable"
    assert parse_dsn(seed) == {
        "host": "localhost",
        "port": "5432",
        "user": "postgres",
        "password": "",
        "dbname": "app",
        "sslmode": "disable",
    }
    assert parse_dsn("password=' dbname=x' host=a")["password"] == " dbname=x"
    assert parse_dsn("password=dbname=x host=a") == {"password": "dbname=x", "host": "a"}
    assert parse_dsn("password = secret=1 host=a")["password"] == "secret=1"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:hunter2@a:1,b:2/app?sslmode=require",
        "host=a,b port=1,2 user=me password=hunter2 dbname=app sslmode=require",
    ],
)
def test_a_data_source_in_either_form_with_several_hosts(text: str) -> None:
    params = parse_dsn(text)
    assert (params["host"], params["port"], params["dbname"]) == ("a,b", "1,2", "app")
    shown = mask_dsn(text)
    assert "hunter2" not in shown
    assert parse_dsn(shown) == params | {"password": MASK}
    assert parse_dsn(effective_dsn(text, application_name="x")) == params | {
        "target_session_attrs": "read-write",
        "connect_timeout": "10",
        "application_name": "x",
    }


def test_what_the_data_source_gives_itself_stays() -> None:
    own = "host=a target_session_attrs=any connect_timeout=3 application_name=mine"
    assert parse_dsn(effective_dsn(own, application_name="x")) == parse_dsn(own)


def test_a_long_application_name_is_cut_between_characters() -> None:
    assert parse_dsn(effective_dsn("", application_name="ä" * 40))["application_name"] == "ä" * 31


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("host=a password=hunter2 hunter2", "without '='"),
        ("host=a password='hunter2", "never closed"),
        ("host=a password=x hunter2=1", "unknown to PostgreSQL"),
        ("host=a passwrd=hunter2", "did you mean 'password'"),
        ("postgresql://u:hunter2%zz@h/db", "%25"),
        ("postgresql://u:hunt@er2@h/db", "%40"),
        ("postgresql://u:12/hunter2@h/db", "%40"),
        ("postgresql://u:hunter2@h/db?x=1", "unknown to PostgreSQL"),
        ("host=a port=hunter2", "port"),
        ("host=a port=1,2", "2 ports"),
        ("host=a port=99999", "port"),
        ("host=a connect_timeout=hunter2", "connect_timeout"),
        ("host=a target_session_attrs=standby", "read-only"),
        ("host=a target_session_attrs=hunter2", "target_session_attrs"),
    ],
)
def test_a_wrong_data_source_is_explained_without_repeating_it(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_dsn(text)
    assert part in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None, "the cause carries the text"
    assert mask_dsn(text) == MASK


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        name: st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=12)
        for name in ("user", "password", "dbname", "host", "options", "sslmode")
    },
)


@given(PARAMS)
def test_a_well_formed_connection_string_keeps_its_meaning(params: dict[str, str]) -> None:
    text = make_conninfo("", **params)
    assert parse_dsn(text) == params
    added = {"target_session_attrs", "connect_timeout", "application_name"}
    effective = parse_dsn(effective_dsn(text, application_name="x"))
    assert {name: value for name, value in effective.items() if name not in added} == params
