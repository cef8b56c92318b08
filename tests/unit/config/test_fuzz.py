"""Files, connection strings and arguments that nobody meant well: an error in one line, and no secret in it."""

from __future__ import annotations

import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from harvester_cli.main import app
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harvester.config import Config, load_config
from harvester.config.dsn import effective_dsn, mask_dsn, parse_dsn
from harvester.config.kafka_options import MASK
from harvester.errors import ConfigurationError, HarvesterError
from tests.support.longs import some_of

CANARY = "Canary7f3a"
SECRETS = f'''data_source = "host=db password={CANARY}"
leader_group_id = "g"
[base_kafka_config]
"sasl.password" = "{CANARY}"
"ssl.key.password" = "{CANARY}"
[limits]
shards = 2
'''
SAMPLE = (Path(__file__).parents[3] / "sample-config.toml").read_text()


def load(content: bytes) -> Config | None:
    """The configuration in a file; None when it was refused, without a word of what is secret."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "h.toml"
        path.write_bytes(content)
        try:
            return load_config(path, (), {})
        except ConfigurationError as error:
            said = f"{error} {error!r} {error.hint} {''.join(traceback.format_exception(error))}"
    assert CANARY not in said
    return None


@given(st.binary(max_size=300))
def test_any_bytes(content: bytes) -> None:
    load(content)


@settings(max_examples=some_of(200), deadline=None)
@given(st.sampled_from([SECRETS, SAMPLE]), st.data())
def test_a_damaged_file(text: str, data: st.DataObject) -> None:
    content = text.encode()
    at = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, 40))
    junk = data.draw(st.binary(max_size=10) | st.sampled_from([b"\n", b'"', b"'''", b"]", b"[[a]]\n", b"= ", b"${X}"]))
    load(content[:at] + junk + content[at + length :])


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + SECRETS.encode(),
        SECRETS.encode("utf-16"),
        b"a = " + b"[" * 100_000,
        b"base_kafka_config." + b"a." * 2_000 + b"b = 1",
        b"a = " + b"9" * 10_000,
        b"a = " + b"1" * 400 + b".0e999999999",
        b"leader_group_id = '" + b"g" * 1_000_000 + b"'",
        f'data_source = "{CANARY}'.encode(),
        f'base_kafka_config = "{CANARY}"'.encode(),
        f'"{CANARY}" = 1'.replace("Canary7f3a", "x").encode(),
        f'[base_kafka_config]\n"sasl.pasword" = "{CANARY}"\n"group.id" = "{CANARY}"'.encode(),
        f'[base_kafka_config]\n"sasl.password" = ["{CANARY}"]'.encode(),
        f'[base_kafka_config]\n"sasl.password" = "{CANARY}\\u0000"'.encode(),
        f'[limits]\nshards = "{CANARY}"'.replace(CANARY, "many").encode(),
        f'data_source = "postgresql://u:{CANARY}@[::1/db"'.encode(),
        f'data_source = "host=db passwrd={CANARY}"'.encode(),
        f'data_source = ["{CANARY}"]'.encode(),
        b"data_source = 1979-05-27T07:32:00Z",
    ],
)
def test_files_made_to_hurt(content: bytes) -> None:
    assert load(content) is None


@given(st.text(max_size=60))
def test_any_connection_string(text: str) -> None:
    try:
        parse_dsn(text)
    except ValueError:
        shown = mask_dsn(text)
    else:
        assert parse_dsn(effective_dsn(text, application_name="x"))
        return
    assert shown == MASK


@pytest.mark.parametrize(
    "form",
    [
        "password='{}", "host=db password={} sslmode", "host=db password={} port=x", "password={} {}=1",
        "postgresql://u:{}@h:99999/d", "postgresql://u:{}@h/d?{}=1", "postgresql://u:{}%zz@h/d", "postgres://{}@{}@h/d",
        "host=db port=1,2,3 password={}", "host=db connect_timeout=1e9 password={}", "{}", "\x00password={}",
        "host=db target_session_attrs=standby password={}", "service={} password",
    ],
)  # fmt: skip
def test_connection_strings_made_to_hurt(form: str) -> None:
    text = form.replace("{}", CANARY)
    with pytest.raises(ConfigurationError) as refused:
        Config(leader_group_id="g", data_source=text)
    assert CANARY not in "".join(traceback.format_exception(refused.value))
    assert mask_dsn(text) == MASK


WORDS = st.sampled_from(
    ["config", "show", "check", "grants", "init", "--print", "--json", "-f", "--set", "--help", "--log-level",
     "--relay", "--writer", "--", "", "limits.shards=0", "x=", "=", "[", "\x00", "\ud800", "${A}", "/nonexistent",
     "/dev/null"]
)  # fmt: skip


@pytest.mark.parametrize("text", ["limits.shards=" + "9" * 5_000, "limits.shards=" + "[" * 50_000, "=", "\x00=\x00"])
def test_overrides_made_to_hurt(text: str) -> None:
    with pytest.raises(ConfigurationError):
        load_config(None, ["leader_group_id=g", text], {})


@settings(max_examples=some_of(60), deadline=None)
@given(st.lists(WORDS | st.text(max_size=8), max_size=5))
def test_any_arguments(words: list[str]) -> None:
    """A result, a usage error, or one of our own errors, which `main` turns into one line."""
    runner = CliRunner()
    unreachable = ["--set", "data_source=host=127.0.0.1 port=1 connect_timeout=1"]
    for arguments in (["config", "check", *words], ["grants", "--relay", "r", *words, *unreachable]):
        done = runner.invoke(app, arguments, env={"HARVESTER_CONFIG": "/dev/null"})
        assert done.exception is None or isinstance(done.exception, SystemExit | HarvesterError), done.exception
