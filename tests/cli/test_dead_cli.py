"""`harvester dead` as a process, for people and for scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harvester.errors import ExitCode
from tests.support.cli import COMMAND, cli_environment, run_cli
from tests.support.dead import ODD_NAME, Outbox

pytestmark = pytest.mark.servers


class Dead:
    """An outbox with three records in quarantine: of keys a and b, and one without."""

    def __init__(self, dsn: str, config: Path, connection: psycopg.Connection[Any], name: str, key_type: str) -> None:
        self.outbox = Outbox.make(connection, name, key_type=key_type)
        self.keys: list[Any] = [b"a", b"\xff\x00", None] if key_type == "bytea" else ["a", "b [red]", None]
        self.ids = self.outbox.add(*self.keys, value="v")
        self.outbox.quarantine(self.ids[0], error="Message size too large\n[bold]x")
        self.outbox.quarantine(*self.ids[1:], error="invalid topic")
        config.write_text(f"data_source = '{dsn}'\noutbox_table = '{name}'\n")
        self.config = config

    def run(self, *args: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        command, *rest = args
        return run_cli("dead", command, "-f", str(self.config), *rest, stdin=stdin, check=check)

    def json(self, *args: str, check: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*args, "--json", check=check).stdout)
        return found

    @property
    def left(self) -> list[int]:
        return self.outbox.ids(self.outbox.table.quarantine)


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


@pytest.fixture
def dead(empty_database: str, connection: psycopg.Connection[Any], tmp_path: Path) -> Dead:
    return Dead(empty_database, tmp_path / "h.toml", connection, "outbox", "text")


def test_list_and_show_for_people(dead: Dead) -> None:
    listed = dead.run("list").stdout.splitlines()
    assert listed[0].split() == ["id", "topic", "key", "quarantined", "at", "attempts", "error"]
    assert [line.split()[0] for line in listed[1:]] == [str(record) for record in reversed(dead.ids)]
    assert "b [red]" in listed[2]
    assert listed[3].rstrip().endswith("Message size too large [bold]x")
    assert "and more" in dead.run("list", "--limit", "2").stdout
    assert dead.run("list", "--limit", str(2**64)).stdout.splitlines() == listed
    assert dead.run("list", "--topic", "nowhere").stdout == "no record matches\n"
    shown = dead.run("show", str(dead.ids[1])).stdout
    for said in ("b [red]", "invalid topic", "1 bytes", "v", "headers"):
        assert said in shown


def test_list_and_show_for_scripts(dead: Dead) -> None:
    found = dead.json("list", "--error", "TOO large")
    assert (found["outbox"], found["more"]) == ('"outbox"', False)
    [record] = found["records"]
    assert (record["id"], record["key"], record["key_base64"], record["attempts"]) == (dead.ids[0], "a", None, 5)
    assert record["error"] == "Message size too large\n[bold]x"
    shown = dead.json("show", str(dead.ids[2]))["record"]
    assert (shown["key"], shown["value"], shown["header_keys"]) == (None, "v", [])
    for args, expected in (
        (["--error-regex", "^invalid"], dead.ids[:0:-1]),
        (["--key", "a"], dead.ids[:1]),
        (["--id", str(dead.ids[0]), "--id", str(dead.ids[2])], dead.ids[::-2]),
        (["--since", "1h", "--topic", "t"], dead.ids[::-1]),
        (["--since", "2999-01-01"], []),
    ):
        assert [record["id"] for record in dead.json("list", *args)["records"]] == expected, args


def test_a_record_goes_back_when_its_order_can_be_kept(dead: Dead) -> None:
    keyless = dead.ids[2]
    dry = dead.json("redrive", "--id", str(keyless), "--dry-run")
    assert [entry["obstacle"] for entry in dry["planned"]] == [None]
    assert dead.left == dead.ids
    assert dead.run("redrive", "--id", str(keyless), stdin="n\n", check=False).returncode == ExitCode.FAILED
    assert dead.left == dead.ids
    done = dead.run("redrive", "--id", str(keyless), stdin="y\n").stdout
    [row] = dead.outbox.rows()
    assert f"record {keyless} of t, no key: back in the outbox with id {row['id']}" in done
    assert done.endswith("1 record put back\n")
    assert dead.left == dead.ids[:2]


def test_a_redrive_that_cannot_keep_the_order_says_why(dead: Dead) -> None:
    refused = dead.run("redrive", "--all", "--yes", check=False)
    assert refused.returncode == ExitCode.FAILED
    assert f"record {dead.ids[0]} of t, key a: later records of its key may have been published" in refused.stdout
    assert "2 of 3 records cannot keep the order of their keys (2 unknown); nothing was changed" in refused.stderr
    assert "--out-of-order" in refused.stderr
    assert dead.left == dead.ids
    told = dead.json("redrive", "--all", "--yes", check=False)
    assert told["redriven"] == []
    assert [(e["id"], e["obstacle"]["reason"]) for e in told["blocked"]] == [(i, "unknown") for i in dead.ids[:2]]
    assert dead.run("redrive", "--all", "--dry-run").returncode == 0
    done = dead.json("redrive", "--all", "--yes", "--out-of-order")["redriven"]
    assert [entry["id"] for entry in done] == dead.ids
    assert [entry["new_id"] for entry in done] == dead.outbox.ids()
    assert dead.left == []


def test_an_order_that_is_only_unknown_can_be_accepted(dead: Dead) -> None:
    """What is known to be broken is refused all the same."""
    first, second, keyless = dead.ids
    [later] = dead.outbox.add("b [red]", value="v")
    refused = dead.run("redrive", "--all", "--yes", "--order", "unknown-ok", check=False)
    assert refused.returncode == ExitCode.FAILED
    assert "1 of 3 records cannot keep the order of their keys (1 waiting)" in refused.stderr
    assert f"(id {later}) waits in the outbox" in refused.stdout
    assert dead.left == dead.ids
    refused = dead.run("redrive", "--id", str(first), "--yes", check=False)
    assert "--order unknown-ok" in refused.stderr
    said = dead.run("redrive", "--id", str(first), "--yes", "--order", "unknown-ok").stdout.splitlines()
    assert "although later records of its key may have been published" in said[0]
    assert said[-1] == "1 record put back, 1 of them in an unknown order"
    [told] = dead.json("redrive", "--id", str(keyless), "--yes", "--order", "unknown-ok")["redriven"]
    assert told["obstacle"] is None
    assert dead.left == [second]


def test_what_is_discarded_leaves_its_reason(dead: Dead) -> None:
    dry = dead.json("discard", "--error", "invalid", "--reason", "test data", "--dry-run")
    assert [entry["id"] for entry in dry["discarded"]] == dead.ids[1:]
    assert dead.left == dead.ids
    shown = dead.json("show", str(dead.ids[0]))["record"]
    done = dead.json("discard", "--key", "a", "--reason", "test data", "--yes")
    assert (done["reason"], done["discarded"]) == ("test data", [shown])  # with its value and headers
    said = dead.run("discard", "--id", str(dead.ids[1]), "--reason", "no longer wanted", stdin="y\n").stdout
    assert "discarded, because no longer wanted; invalid topic" in said
    assert dead.left == dead.ids[2:]


@pytest.mark.parametrize("form", ["--json", "--limit=9"])
def test_what_cannot_be_printed_is_not_discarded(dead: Dead, form: str) -> None:
    command = ["dead", "discard", "-f", str(dead.config), "--key", "a", "--reason", "no", "--yes", form]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*COMMAND, *command], env=cli_environment(), stdout=full, timeout=60, check=False)
    assert ended.returncode == 1
    assert dead.left == dead.ids


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["redrive", "--yes"], "select records"),
        (["redrive", "--all", "--topic", "t"], "cannot be combined"),
        (["redrive", "--all", "--json"], "--yes"),
        (["discard", "--all"], "--reason"),
        (["discard", "--all", "--yes", "--reason", " "], "is empty"),
        (["list", "--since", "yesterday"], "neither a duration"),
        (["list", "--since", "9999999d"], "before the year 1"),
        (["list", "--since", "9999999d", "--dead-letter-topic", "t"], "before the year 1"),
        (["list", "--id", str(2**63)], "out of range"),
        (["show", str(2**63)], "out of range"),
        (["list", "--key", "\udcff"], "is not valid UTF-8; use --key-base64"),
        (["list", "--error", "\udcff"], "is not valid UTF-8"),
        (["list", "--key-base64", "?"], "is not base64"),
        (["list", "--key", "a", "--key-base64", "YQ=="], "not both"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(args: list[str], said: str) -> None:
    done = run_cli("dead", *args, check=False)
    assert done.returncode == ExitCode.USAGE
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_what_is_not_there_is_told(dead: Dead, empty_database: str) -> None:
    for args in (["show", "4711"], ["redrive", "--id", "4711", "--yes"], ["discard", "--id", "4711", "--reason", "x"]):
        done = dead.run(*args, check=False)
        assert done.returncode == ExitCode.FAILED, args
        assert "in quarantine" in done.stderr
    assert dead.run("redrive", "--topic", "nowhere", "--yes").stdout == "0 records put back\n"
    bad = dead.run("list", "--error-regex", "(", check=False)
    assert (bad.returncode, "not a valid regular expression" in bad.stderr) == (ExitCode.FAILED, True)


@pytest.mark.parametrize("name", ["outbox", ODD_NAME])
def test_bytes_and_odd_names(
    empty_database: str, connection: psycopg.Connection[Any], tmp_path: Path, name: str
) -> None:
    dead = Dead(empty_database, tmp_path / "h.toml", connection, name, "bytea")
    [record] = dead.json("list", "--key-base64", "/wA=")["records"]
    assert (record["id"], record["key"], record["key_base64"]) == (dead.ids[1], None, "/wA=")
    assert "\\xff00" in dead.run("list").stdout
    [done] = dead.json("redrive", "--key-base64", "/wA=", "--yes", "--out-of-order")["redriven"]
    assert [row["kafka_key"] for row in dead.outbox.rows()] == [b"\xff\x00"]
    assert done["new_id"] == dead.outbox.ids()[0]


def test_before_init_it_points_to_init(empty_database: str) -> None:
    done = run_cli("dead", "list", "--set", f"data_source={empty_database}", check=False)
    assert done.returncode == ExitCode.SCHEMA
    assert done.stderr.splitlines()[-1].startswith("hint: run `harvester init`")
