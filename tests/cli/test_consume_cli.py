"""`harvester consume` and `harvester claims` as processes, on a real broker."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from harvester.errors import ExitCode
from tests.support.cli import COMMAND, RunningCli, cli_environment, run_cli
from tests.support.servers import Servers
from tests.support.wait import eventually

pytestmark = pytest.mark.servers


@dataclass
class Scene:
    """A topic of 4 partitions, a group, and a coordination topic of its own."""

    bootstrap: str
    topic: str
    group: str
    coordination: str
    interval_s: float = 1.0

    @property
    def where(self) -> list[str]:
        interval = f"{self.interval_s:g}s"
        return [
            "--bootstrap",
            self.bootstrap,
            "--coordination-topic",
            self.coordination,
            "--heartbeat-interval",
            interval,
        ]

    def slower(self, interval_s: float) -> Scene:
        """With longer heartbeats, for tests in which a process that is late changes what is seen."""
        return replace(self, interval_s=interval_s)

    @property
    def consuming(self) -> list[str]:
        return ["consume", *self.where, "--group", self.group, "--topic", self.topic, "--coordination-partitions", "2"]

    def fill(self, *values: bytes | None, **given: Any) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "broker.address.family": "v4"})
        for number, value in enumerate(values):
            producer.produce(self.topic, value=value, partition=number % 4, **given)
        assert producer.flush(30) == 0

    def numbers(self, first: int, end: int) -> list[str]:
        texts = [str(number) for number in range(first, end)]
        self.fill(*(text.encode() for text in texts))
        return texts

    def claims(self, *args: str) -> list[dict[str, Any]]:
        done = run_cli("claims", *self.where, "--group", self.group, "--json", *args)
        rows: list[dict[str, Any]] = json.loads(done.stdout)["claims"]
        return rows

    def admin(self, command: str, *args: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_cli("claims", command, *self.where, "--group", self.group, *args, check=check, stdin=stdin)


@pytest.fixture
def scene(servers: Servers, topic: str) -> Scene:
    name = uuid.uuid4().hex[:8]
    return Scene(servers.bootstrap, topic, f"group-{name}", f"marshal-{name}")


def test_records_are_printed_once_by_a_consumer_and_its_successor(scene: Scene) -> None:
    first = scene.numbers(0, 40)
    with RunningCli(*scene.consuming, "--format", "value") as running:
        eventually(lambda: len(running.stdout) == 40, what="40 lines")
        assert running.stop() == 0
    assert sorted(running.stdout) == sorted(first)
    rows = scene.claims()
    assert [(row["partition"], row["state"], row["last_offset"], row["lag"]) for row in rows] == [
        (partition, "free", 9, 0) for partition in range(4)
    ]
    second = scene.numbers(40, 60)
    done = run_cli(*scene.consuming, "--format", "value", "--count", "20")
    assert sorted(done.stdout.split()) == sorted(second)
    assert complaints(done.stderr.splitlines()) == []


def test_a_line_of_json_has_all_of_a_record(scene: Scene) -> None:
    scene.fill(b"\xff\x00", key=b"k", headers=[("h", b"\xfe"), ("none", None)], timestamp=1_000)
    done = run_cli(*scene.consuming, "--count", "1", "--amo")
    assert json.loads(done.stdout) == {
        "topic": scene.topic,
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:01+00:00",
        "timestamp_kind": "created",
        "key": "k",
        "key_base64": None,
        "value": None,
        "value_base64": "/wA=",
        "headers": [
            {"key": "h", "value": None, "value_base64": "/g=="},
            {"key": "none", "value": None, "value_base64": None},
        ],
    }


def test_a_command_is_given_each_record_and_what_it_refuses_becomes_a_dead_letter(scene: Scene, tmp_path: Path) -> None:
    values = scene.numbers(0, 12)
    taken = tmp_path / "taken"
    command = f'value=$(cat); [ "$value" != 5 ] && echo "$value $HARVESTER_TOPIC $HARVESTER_PARTITION" >> {taken}'
    letters = f"{scene.group}.dead"
    options = ["--on-error", "dead-letter", "--attempts", "1", "--dead-letter-topic", letters, "--workers", "2"]
    run_cli(*scene.consuming, "--format", "value", "--exec", command, *options, "--count", "12", timeout_s=60)
    assert [row["lag"] for row in scene.claims()] == [0] * 4
    lines = sorted(taken.read_text().splitlines())
    assert lines == sorted(f"{value} {scene.topic} {int(value) % 4}" for value in values if value != "5")
    done = run_cli("dead", "list", "--dead-letter-topic", letters, "--bootstrap", scene.bootstrap, "--json")
    (letter,) = json.loads(done.stdout)["records"]
    assert (letter["partition"], letter["offset"], letter["attempts"]) == (1, 1, 1)
    assert "exit code 1" in letter["error"]


@pytest.mark.parametrize("options", [(), ("--exec", 'test "$(cat)" != 7', "--on-error", "skip", "--attempts", "1")])
def test_figures_are_printed_beside_the_records(scene: Scene, options: tuple[str, ...]) -> None:
    scene.numbers(0, 12)
    given_up = 1 if options else 0
    done = run_cli(
        *scene.consuming, "--format", "value", "--client-id", "c-1", "--count", "12", "--watch", *options, timeout_s=60
    )
    assert len(done.stdout.splitlines()) == (0 if options else 12)
    lines = [line.split() for line in done.stderr.splitlines() if "claims=" in line]
    figures = dict(pair.split("=") for pair in lines[-1][3:])
    assert lines[-1][1:3] == [scene.group, "c-1"]
    assert (figures["records"], figures["failures"], figures["given_up"]) == ("12", str(given_up), str(given_up))
    assert len(lines) >= 2


def test_a_command_that_fails_ends_it_by_default(scene: Scene) -> None:
    scene.fill(b"x")
    done = run_cli(*scene.consuming, "--exec", "exit 3", check=False)
    assert done.returncode == 1
    assert "exit code 3" in done.stderr


@pytest.mark.parametrize(
    "options", [("--on-error", "skip"), ("--workers", "2"), ("--exec", "true", "--timeout", "1")], ids=lambda it: it[0]
)
def test_options_that_do_not_go_together_are_refused(scene: Scene, options: tuple[str, ...]) -> None:
    assert run_cli(*scene.consuming, *options, check=False).returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_hands_over(scene: Scene, number: signal.Signals) -> None:
    scene.numbers(0, 4)
    with RunningCli(*scene.consuming) as running:
        eventually(lambda: len(running.stdout) == 4, what="4 lines")
        assert running.stop(number) == 0
    assert complaints(running.stderr) == []
    assert {row["client"] for row in scene.claims()} == {None}


def test_a_reader_that_has_gone_ends_it_quietly(scene: Scene) -> None:
    scene.numbers(0, 8)
    command = subprocess.Popen(
        [*COMMAND, *scene.consuming], env=cli_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    assert command.stderr is not None
    os.read(command.stdout.fileno(), 1)
    command.stdout.close()
    scene.numbers(8, 16)
    assert command.wait(30) == 141
    assert complaints(command.stderr.read().decode().splitlines()) == []


def test_a_second_process_of_a_client_is_refused(scene: Scene) -> None:
    scene = scene.slower(8.0)  # the second one listens for most of it, and must hear the first one
    with RunningCli(*scene.consuming, "--client-id", "one") as running:
        eventually(lambda: _held(scene) == 4, what="all claims")
        done = run_cli(*scene.consuming, "--client-id", "one", check=False)
        assert done.returncode == ExitCode.CONFIGURATION
        assert "another live process" in done.stderr
        assert running.stop() == 0


def test_claims_for_people_and_for_scripts(scene: Scene) -> None:
    scene = scene.slower(3.0)
    scene.numbers(0, 8)

    def fresh() -> list[dict[str, Any]]:
        rows = scene.claims()
        states = [(row["client"], row["state"], row["lag"], row["certain"]) for row in rows]
        return rows if states == [("one", "fresh", 0, True)] * 4 else []

    def told() -> list[str]:
        lines = run_cli("claims", *scene.where).stdout.splitlines()
        return lines if lines[0] == "4 partitions, 1 client (4 each); 4 fresh; lag 0" else []

    with RunningCli(*scene.consuming, "--client-id", "one") as running:
        eventually(lambda: len(running.stdout) == 8 and _held(scene) == 4, what="all records")
        eventually(lambda: {row["last_offset"] for row in scene.claims()} == {1}, what="positions in the log")
        rows = eventually(fresh, what="fresh claims")
        assert all(row["age_s"] < 2 * scene.interval_s and row["generation"] >= 0 for row in rows)
        shown = eventually(told, what="fresh claims in words")
        assert shown[1].split() == ["topic", "#", "state", "age", "last", "offset", "lag", "generation", "client"]
        assert len(shown) == 6
        with RunningCli("claims", *scene.where, "--watch", "--json") as watching:
            eventually(lambda: len(watching.stdout) >= 2, what="two looks")
            assert watching.stop(signal.SIGINT) == 0
        assert [len(json.loads(line)["claims"]) for line in watching.stdout] == [4] * len(watching.stdout)
        running.process.kill()
    assert run_cli("claims", *scene.where, "--group", "nobody").stdout == "nothing has ever been claimed\n"
    eventually(lambda: {row["state"] for row in scene.claims()} == {"stale"}, what="stale claims")


def test_the_live_table_on_a_terminal(scene: Scene) -> None:
    scene.numbers(0, 8)
    run_cli(*scene.consuming, "--count", "8")
    master, slave = pty.openpty()
    command = subprocess.Popen(
        [*COMMAND, "claims", *scene.where, "--group", scene.group, "--watch"],
        env=cli_environment({"TERM": "xterm"}), stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    seen = bytearray()
    while b"4 free" not in seen:
        ready, _, _ = select.select([master], [], [], 30)
        assert ready, bytes(seen)
        seen += os.read(master, 1 << 16)
    assert f"claims of {scene.group}".encode() in seen
    assert b"\x1b[?1049h" in seen  # a screen of its own
    command.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # which is how a terminal says that nobody has it open any more
        while os.read(master, 1 << 16):  # a terminal that nobody reads fills up, and holds up whoever writes there
            pass
    assert command.wait(30) == 0
    os.close(master)


def test_claims_of_a_client_are_released(scene: Scene) -> None:
    scene.numbers(0, 8)
    with RunningCli(*scene.consuming, "--client-id", "dead") as running:
        eventually(lambda: len(running.stdout) == 8, what="all records")
        eventually(lambda: {row["last_offset"] for row in scene.claims()} == {1}, what="positions in the log")
        running.process.kill()
    assert scene.admin("release", "--client", "dead", stdin="n\n", check=False).returncode == ExitCode.FAILED
    assert _held(scene) == 4
    done = scene.admin("release", "--client", "dead", "--yes", "--json")
    assert [row["released"] for row in json.loads(done.stdout)["released"]] == [True] * 4
    assert [(row["state"], row["last_offset"]) for row in scene.claims()] == [("free", 1)] * 4
    again = scene.admin("release", "--client", "dead", "--yes", check=False)
    assert (again.returncode, again.stderr.splitlines()[0]) == (
        ExitCode.FAILED,
        f"harvester: client 'dead' holds nothing in group {scene.group!r}",
    )


def test_a_live_client_stops_when_it_is_released_and_nothing_is_lost_or_repeated(scene: Scene) -> None:
    values = scene.numbers(0, 8)
    with RunningCli(*scene.consuming, "--client-id", "one", "--format", "value") as running:
        eventually(lambda: len(running.stdout) == 8, what="all records")
        eventually(lambda: {row["last_offset"] for row in scene.claims()} == {1}, what="positions in the log")
        before = {row["generation"] for row in scene.claims()}
        scene.admin("release", "--client", "one", "--yes")
        eventually(lambda: before.isdisjoint(row["generation"] for row in scene.claims()), what="other claims")
        eventually(lambda: _held(scene) == 4, what="claimed again")
        assert before.isdisjoint(row["generation"] for row in scene.claims())
        values += scene.numbers(8, 16)
        eventually(lambda: len(running.stdout) >= 16, what="the others")
        assert running.stop() == 0
    assert sorted(running.stdout) == sorted(values)


@pytest.mark.parametrize("live", [False, True], ids=["nobody runs", "a consumer runs"])
def test_a_position_is_set(scene: Scene, live: bool) -> None:
    values = scene.numbers(0, 16)
    with RunningCli(*scene.consuming, "--format", "value") as running:
        eventually(lambda: len(running.stdout) == 16, what="all records")
        eventually(lambda: {row["last_offset"] for row in scene.claims()} == {3}, what="positions in the log")
        if not live:
            assert running.stop() == 0
        assert scene.admin("set-position", "--topic", scene.topic, "--offset", "2", check=False).returncode == 1
        done = scene.admin("set-position", "--topic", scene.topic, "--offset", "2", "--yes")
        assert done.stdout.splitlines()[0] == f"{scene.topic}[0] of {scene.group}: begins at offset 2"
        if live:
            eventually(lambda: len(running.stdout) >= 24, what="the second half again")
            assert running.stop() == 0
            assert sorted(running.stdout) == sorted([*values, *values[8:]])
            return
    assert [(row["last_offset"], row["lag"]) for row in scene.claims()] == [(1, 2)] * 4
    assert sorted(_rest(scene)) == sorted(values[8:])
    scene.admin("set-position", "--topic", scene.topic, "--partition", "3", "--offset", "earliest", "--yes", "--json")
    assert _rest(scene) == values[3::4]
    scene.admin("set-position", "--topic", scene.topic, "--offset", "earliest", "--yes")
    scene.admin("set-position", "--topic", scene.topic, "--offset", "latest", "--yes")
    assert _rest(scene) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--offset", "soon"], "'soon' is not an offset"),
        (["--offset", "7"], "holds offsets 0 to 2, not 7"),
        (["--offset", "0", "--partition", "4"], "has no partition 4"),
        (["--offset", "0", "--topic", "nowhere"], "there is no topic 'nowhere'"),
        (["--offset", "0", "--json"], "cannot ask for confirmation"),
    ],
)
def test_positions_that_cannot_be_set(scene: Scene, args: list[str], said: str) -> None:
    scene.numbers(0, 8)
    run_cli(*scene.consuming, "--count", "8")
    done = scene.admin("set-position", "--topic", scene.topic, *args, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("group", "said"), [("", "group: is empty"), ("\udcff", "group: is not valid UTF-8")])
@pytest.mark.parametrize(
    "command",
    ["claims", "claims release --client c", "claims set-position --topic t --offset latest --yes", "consume --topic t"],
)
def test_a_group_without_a_name_is_refused(command: str, group: str, said: str) -> None:
    done = run_cli(*command.split(), "--bootstrap", "127.0.0.1:1", "--group", group, check=False)
    assert done.returncode == ExitCode.CONFIGURATION
    assert said in done.stderr


def test_a_topic_that_does_not_exist_is_named(scene: Scene) -> None:
    wrong = f"{scene.topic}x"
    where = ["--group", scene.group, "--topic", scene.topic, "--topic", wrong]
    done = run_cli("consume", *scene.where, *where, "--timeout", "1", check=False)
    assert done.returncode == ExitCode.INPUT
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert lines[0] == f"harvester: there is no topic {wrong!r}"
    assert lines[1].startswith("hint: did you mean")
    assert repr(scene.topic) in lines[1]


def test_errors_have_a_hint(scene: Scene) -> None:
    done = run_cli("claims", *scene.where, check=False)
    assert done.returncode == ExitCode.CONFIGURATION
    assert "there is no coordination topic" in done.stderr
    assert "hint: " in done.stderr
    nowhere = ["--bootstrap", "127.0.0.1:1"]  # both give up after 10 s
    with (
        RunningCli("claims", *nowhere) as claims,
        RunningCli("consume", "--group", "g", "--topic", "t", *nowhere) as consume,
    ):
        codes = [claims.wait(), consume.wait()]
    assert codes == [ExitCode.UNAVAILABLE] * 2
    for running in (claims, consume):
        error, *rest = running.stderr  # and no line of the client's
        assert error.startswith("harvester: Kafka at 127.0.0.1:1 does not answer")
        assert all(line.startswith("hint: ") for line in rest)


def test_at_most_once_what_lies_behind_the_count_is_left_for_the_next(scene: Scene) -> None:
    scene = scene.slower(4.0)  # as long does an end wait for what is being claimed
    numbers = scene.numbers(0, 40)
    printed: list[str] = []
    for _ in range(4):
        done = run_cli(*scene.consuming, "--format", "value", "--amo", "--count", "10")
        printed += done.stdout.split()
    assert sorted(printed) == sorted(numbers)


def complaints(lines: list[str]) -> list[str]:
    """What is no log line of level info."""
    return [line for line in lines if '"level": "info"' not in line]


def _held(scene: Scene) -> int:
    done = run_cli("claims", *scene.where, "--group", scene.group, "--json", check=False)
    if done.returncode:  # not made yet
        return 0
    return sum(row["client"] is not None for row in json.loads(done.stdout)["claims"])


def _rest(scene: Scene) -> list[str]:
    return run_cli(*scene.consuming, "--format", "value", "--timeout", "4").stdout.split()
