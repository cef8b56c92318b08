"""The pure pieces of the configuration: durations, variables, overrides, identity, secrets, connection strings."""

from __future__ import annotations

from datetime import timedelta

import pytest

from harvester.config.dsn import effective_dsn, mask_dsn, parse_dsn
from harvester.config.durations import format_duration, parse_duration, to_ms
from harvester.config.fields import group_id_from
from harvester.config.kafka_options import MASK, is_secret, mask_options, scrub
from harvester.config.load import apply_overrides, interpolate_table, parse_value


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("100ms", 100),
        ("1.5s", 1500),
        ("5m", 300_000),
        ("2h", 7_200_000),
        (" 10s ", 10_000),
        ("1m30s", 90_000),
        (".5s", 500),
        ("7d", 604_800_000),
        ("1d12h", 129_600_000),
    ],
)
def test_durations_are_read(text: str, ms: int) -> None:
    assert parse_duration(text) == timedelta(milliseconds=ms)
    assert to_ms(parse_duration(text)) == ms


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5", '"5s" or "5ms"'),
        ("0.5", "no unit"),
        ("-5s", "not a duration"),
        ("5 s", "not a duration"),
        ("5S", "not a duration"),
        ("s", "not a duration"),
        ("5sms", "not a duration"),
        ("", "empty"),
        ("0.1us", "finer"),
        ("9" * 40 + "h", "too long"),
        ("1s" * 40, "too long"),
        ("٥s", "not a duration"),
    ],
)
def test_what_is_no_duration_says_why(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(text)
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["100ms", "1.5s", "5m", "2h", "24h", "7d", "25h", "1us", "1.001ms", "61s", "0s"])
def test_durations_are_written_as_a_person_would(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


def test_variables_are_replaced_where_they_stand() -> None:
    table = {"a": "x-${V}-y", "t": {"b": ["${W:-w}", 1], "c": "${E:-e}"}, "d": "$$${V} $5 $V"}
    resolved, problems = interpolate_table(table, {"V": "1${V}", "E": ""})
    assert problems == []
    assert resolved == {"a": "x-1${V}-y", "t": {"b": ["w", 1], "c": "e"}, "d": "$1${V} $5 $V"}


def test_every_missing_variable_is_reported_with_its_path() -> None:
    resolved, problems = interpolate_table({"a": "${A}", "t": {"b": "${B} ${1}"}, "c": "${E}"}, {"E": ""})
    assert [(problem.path, problem.message) for problem in problems] == [
        ("a", "the environment variable A is not set"),
        ("t.b", "the environment variable B is not set"),
        ("t.b", "has a '${' that does not refer to a variable"),
    ]
    assert resolved["c"] == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("limits.shards=4", {"limits": {"shards": 4}}),
        ("limits.heartbeat_timeout=5s", {"limits": {"heartbeat_timeout": "5s"}}),
        ('limits.heartbeat_timeout="5s"', {"limits": {"heartbeat_timeout": "5s"}}),
        ("base_kafka_config.bootstrap.servers=h:1", {"base_kafka_config": {"bootstrap.servers": "h:1"}}),
        ('producer_kafka_config."linger.ms"=5', {"producer_kafka_config": {"linger.ms": 5}}),
        ("data_source=host=a password=b=c", {"data_source": "host=a password=b=c"}),
        ("name=123", {"name": "123"}),
        ("name=true", {"name": "true"}),
        ("name=", {"name": ""}),
        ('limits={shards = 2, mark_backoff = "1ms"}', {"limits": {"shards": 2, "mark_backoff": "1ms"}}),
        ("outbox_table='\"My Schema\".x'", {"outbox_table": '"My Schema".x'}),
    ],
)
def test_overrides(override: str, expected: object) -> None:
    data, _, problems = apply_overrides({}, [override])
    assert (data, problems) == (expected, [])


def test_overrides_replace_what_the_file_says_under_another_spelling() -> None:
    file = {"limits": {"send_concurrency": 2, "send_buffer": 3}, "base_kafka_config": {"bootstrap": {"servers": "a:1"}}}
    data, touched, problems = apply_overrides(
        file, ["limits.shards=4", "limits.shards=5", "base_kafka_config.metadata.broker.list=b:1"]
    )
    assert problems == []
    assert data == {
        "limits": {"send_buffer": 3, "shards": 5},
        "base_kafka_config": {"metadata.broker.list": "b:1"},
    }
    assert touched == {"limits.shards", "base_kafka_config.metadata.broker.list"}
    assert file["limits"] == {"send_concurrency": 2, "send_buffer": 3}, "the file's own data was changed"


def test_an_override_that_is_none_is_reported_without_its_text() -> None:
    _, _, problems = apply_overrides({"name": "x"}, ["hunter2", "=hunter2", "a..b=hunter2", "name.x=hunter2"])
    assert len(problems) == 4
    assert "hunter2" not in "".join(map(str, problems))


def test_an_override_cannot_bring_in_a_second_setting() -> None:
    assert parse_value("1\nlimits = 2") == "1\nlimits = 2"


@pytest.mark.parametrize(
    ("script", "module", "group"),
    [
        ("/usr/local/bin/harvester", None, "harvester"),
        ("/srv/billing-api.py", None, "billing-api"),
        ("/srv/my app (1)", None, "my_app__1_"),
        ("/x/__main__.py", "harvester_cli.__main__", "harvester"),
        ("/x/__main__.py", "orders.relay.__main__", "orders"),
        ("/x/orders.v2", None, "orders.v2"),
        ("/venv/bin/gunicorn", None, ""),
        ("/venv/bin/python3.12", None, ""),
        ("python", None, ""),
        ("-c", None, ""),
        ("", None, ""),
        ("/x/pytest/__main__.py", "pytest.__main__", ""),
        ("uvicorn", None, ""),
        ("/venv/bin/celery", None, ""),
        ("ipython3", None, ""),
        ("/x/uwsgi", None, ""),
        ("...", None, ""),
    ],
)
def test_the_group_id_comes_from_the_main_script(script: str, module: str | None, group: str) -> None:
    assert group_id_from(script, module) == group


@pytest.mark.parametrize(
    "option",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.config",
        "sasl.username",
        "SASL.PASSWORD",
    ],
)
def test_secret_options_are_masked(option: str) -> None:
    assert mask_options({option: "hunter2"}) == {option: MASK}
    assert scrub("bad hunter2!", {option: "hunter2"}) == f"bad {MASK}!"


@pytest.mark.parametrize(
    "option", ["bootstrap.servers", "ssl.key.location", "ssl.ca.location", "client.id", "linger.ms", "sasl.mechanisms"]
)
def test_other_options_are_shown(option: str) -> None:
    assert not is_secret(option)


def test_a_login_in_a_url_is_masked() -> None:
    shown = mask_options({"sasl.oauthbearer.token.endpoint.url": "https://me:hunter2@auth/x"})
    assert shown == {"sasl.oauthbearer.token.endpoint.url": f"https://{MASK}@auth/x"}


def test_the_seeds_data_source_means_what_it_says() -> None:
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
        ("host=a password=x hunter2=1", "does not know"),
        ("host=a passwrd=hunter2", "did you mean 'password'"),
        ("postgresql://u:hunter2%zz@h/db", "%25"),
        ("postgresql://u:hunt@er2@h/db", "%40"),
        ("postgresql://u:12/hunter2@h/db", "%40"),
        ("postgresql://u:hunter2@h/db?x=1", "does not know"),
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
