"""`harvester dead --dead-letter-topic` as a process."""

from __future__ import annotations

import json
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harvester.coordination.dead_letters import DeadLetter, DeadLetterTopic, DeadLetterWriter, ensure_dead_letter_topic
from harvester.errors import ExitCode
from tests.support.cli import COMMAND, cli_environment, run_cli
from tests.support.consuming import read_topic
from tests.support.servers import Servers

pytestmark = pytest.mark.servers

LETTER = DeadLetter(
    group="billing", topic="orders", partition=1, offset=7, key=b"k[1]", value=b"v", headers=[("h", b"\xff")],
    error="ValueError: no\nnumber", attempts=5, client="c-1", timestamp_ms=1_000, failed_at_ms=1_700_000_000_000,
)  # fmt: skip


class Letters:
    """A dead-letter topic with three records, and the command for it."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.name, self._bootstrap = f"{uuid.uuid4().hex[:8]}.dead-letters", bootstrap
        self.options = options = {"bootstrap.servers": bootstrap, "broker.address.family": "v4"}
        self.topic = DeadLetterTopic(self.name, options)
        ensure_dead_letter_topic(self.name, options)
        ensure_dead_letter_topic(self.name, options)
        writer = DeadLetterWriter(self.name, options)
        self.letters = [
            replace(LETTER, topic=topic),
            replace(LETTER, topic=topic, offset=8, value=None, failed_at_ms=1_700_000_001_000),
            replace(LETTER, topic=topic, partition=2, key=None, error="KeyError: 3", failed_at_ms=1_700_000_002_000),
        ]
        for letter in [*self.letters, self.letters[0]]:  # that one twice, as after a hand-over
            writer.send(letter)

    def run(self, command: str, *args: str, check: bool = True, stdin: str = "") -> Any:
        return run_cli("dead", command, *args, *self.where, check=check, stdin=stdin)

    @property
    def where(self) -> tuple[str, ...]:
        return "--dead-letter-topic", self.name, "--bootstrap", self._bootstrap

    def json(self, *args: str) -> Any:
        return json.loads(self.run(*args, "--json").stdout)

    @property
    def left(self) -> list[str]:
        return [letter.place for letter in self.topic.read()]


@pytest.fixture
def letters(servers: Servers, topic: str) -> Letters:
    return Letters(servers.bootstrap, topic)


def test_list_and_show(letters: Letters) -> None:
    first, second, third = (letter.place for letter in letters.letters)
    listed = letters.run("list").stdout.splitlines()
    assert listed[0].split() == ["id", "group", "key", "failed", "at", "attempts", "error"]
    assert [line.split()[0] for line in listed[1:]] == [third, second, first]
    assert "k[1]" in listed[3]
    assert "2023-11-14 22:13:20" in listed[3]
    assert "ValueError: no number" in listed[3]
    assert "and more" in letters.run("list", "--limit", "2").stdout
    shown = letters.run("show", first).stdout
    assert "billing, client c-1" in shown
    assert r"h: \xff" in shown
    found = letters.json("show", first)["record"]
    assert (found["id"], found["attempts"], found["value"]) == (first, 5, "v")
    assert found["headers"] == [{"key": "h", "value": None, "value_base64": "/w=="}]
    shown = letters.json("show", second)
    assert (shown["record"]["value_bytes"], shown["others"]) == (None, [])


def test_all_letters_of_a_place_are_shown(letters: Letters) -> None:
    """Of two groups that share the topic."""
    one = letters.letters[0]
    DeadLetterWriter(letters.name, letters.options).send(replace(one, group="shipping", error="ValueError: too late"))
    shown = letters.json("show", one.place)
    found = {each["group"]: each["error"] for each in (shown["record"], *shown["others"])}
    assert found == {"billing": one.error, "shipping": "ValueError: too late"}


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (("--key", "k[1]"), [1, 0]),
        (("--error", "VALUE"), [1, 0]),
        (("--error-regex", "^key"), [2]),
        (("--since", "2023-11-14T22:13:21"), [2, 1]),
        (("--topic", "another"), []),
        (("--id", "{0}", "--id", "{2}"), [2, 0]),
    ],
)
def test_what_is_chosen(letters: Letters, chosen: tuple[str, ...], found: list[int]) -> None:
    places = [letter.place for letter in letters.letters]
    records = letters.json("list", *(each.format(*places) for each in chosen))["records"]
    assert [record["id"] for record in records] == [places[each] for each in found]


def test_redrive(letters: Letters, servers: Servers, topic: str) -> None:
    first, second, third = (letter.place for letter in letters.letters)
    assert "2 records would be put back" in letters.run("redrive", "--key", "k[1]", "--dry-run").stdout
    assert letters.run("redrive", "--key", "k[1]", stdin="n\n", check=False).returncode != 0
    assert letters.left == [first, second, third]
    done = letters.json("redrive", "--key", "k[1]", "--yes")
    assert [record["id"] for record in done["redriven"]] == [first, second]
    assert letters.left == [third]
    back = [(each.partition, each.key, each.value) for each in read_topic(servers.bootstrap, topic)]
    assert back == [(1, b"k[1]", b"v"), (1, b"k[1]", None)]
    assert "0 records put back" in letters.run("redrive", "--key", "k[1]", "--yes").stdout


def test_discard(letters: Letters, servers: Servers, topic: str) -> None:
    first, second, third = (letter.place for letter in letters.letters)
    done = letters.json("discard", "--all", "--limit", "2", "--reason", "old", "--yes")
    assert [(record["id"], record["value"]) for record in done["discarded"]] == [(first, "v"), (second, None)]
    assert letters.left == [third]
    assert read_topic(servers.bootstrap, topic) == []


def test_what_cannot_be_printed_is_not_discarded(letters: Letters) -> None:
    command = ["dead", "discard", "--all", "--reason", "no", "--yes", *letters.where]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*COMMAND, *command], env=cli_environment(), stdout=full, timeout=60, check=False)
    assert ended.returncode == 1
    assert letters.left == [letter.place for letter in letters.letters]


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("list", "--incarnation", str(uuid.UUID(int=1))), ExitCode.USAGE, "applies to an outbox"),
        (("redrive", "--yes"), ExitCode.USAGE, "select records"),
        (("show", "a/0/1"), ExitCode.FAILED, "no such record"),
        (("list", "--error-regex", "("), ExitCode.USAGE, "error-regex"),
    ],
)
def test_what_is_refused(letters: Letters, args: tuple[str, ...], status: ExitCode, words: str) -> None:
    ended = letters.run(*args, check=False)
    assert (ended.returncode, words in ended.stderr) == (status, True), ended.stderr


def test_a_topic_that_there_is_not(letters: Letters) -> None:
    letters.name = "nowhere"
    ended = letters.run("list", check=False)
    assert ended.returncode == ExitCode.INPUT
    assert "--dead-letter-topic" in ended.stderr
