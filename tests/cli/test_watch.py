"""`harvester watch` and the commands beside it, against sockets on which no relay stands."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from harvester_cli.dashboard.lines import key_words
from harvester_cli.dashboard.live import status_line

from harvester.control.protocol import from_json
from harvester.status import KeyStatus, Status
from tests.support.cli import RunningCli, run_cli
from tests.support.control import Dummy, at, serving
from tests.support.statuses import KEY
from tests.support.terminal import OnTerminal
from tests.support.wait import eventually

pytest_plugins = ["tests.support.sockets"]

SHOWN = r"LEADING for[\s\S]*p pause"  # before that a key means nothing
LEAVES_THE_SCREEN = b"\x1b[?1049l"


def named(name: str) -> Dummy:
    dummy = Dummy()
    dummy.now = replace(dummy.now, name=name)
    return dummy


def test_keys_reach_the_harvester_and_the_terminal_is_left_as_it_was(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.press("p")
        terminal.wait_for(r"PAUSED for[\s\S]*pausing: done")
        terminal.press("p")
        terminal.wait_for(r"LEADING for[\s\S]*resuming: done")
        terminal.press("+")
        terminal.wait_for("changing to 5 shards: done")
        terminal.press("3")
        terminal.wait_for("── shard 3 ──")
        terminal.press("\x1b")
        terminal.wait_for("── shards ──[─ ]* 5: 5 ready")
        terminal.press("d")
        terminal.wait_for("── quarantine ──")
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.settings() == terminal.before
        assert terminal.raw.rindex(LEAVES_THE_SCREEN) > terminal.raw.rindex(b"billing-1")
    assert dummy.asked == ["pause", "resume", ("scale", 5, 10.0)]


def test_one_key_is_entered_shown_and_asked_about_again(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.press("kaccount-4")
        terminal.wait_for("key: account-4_")
        terminal.press("\r")
        terminal.wait_for(r"── key ──[\s\S]*account-4[\s\S]*in the outbox: 43")
        eventually(lambda: dummy.asked.count(("key", "account-4")) > 1, what="asked again")
        dummy.refuses = True
        terminal.wait_for("the relay does not answer")
        terminal.press("\x1bq")
        assert terminal.wait() == 0
    with serving(sockets / "x.sock"), OnTerminal("watch", "--key", "account-5", env=at(sockets)) as terminal:
        terminal.wait_for(r"── key ──[\s\S]*account-5[\s\S]*in quarantine: 1")
        terminal.press("q")
        assert terminal.wait() == 0


def test_a_configuration_names_the_harvester(sockets: Path, tmp_path: Path) -> None:
    config = tmp_path / "h.toml"
    with serving(sockets / "x.sock", named("one")), serving(sockets / "y.sock", named("two")):
        for text, expected in (
            ("", 2), ('name = "y"\n', 1), (f'[control]\nsocket = "{sockets / "x.sock"}"\n', 1),
        ):  # fmt: skip
            config.write_text(f'leader_group_id = "g"\n{text}')
            told = run_cli("watch", "--once", "--json", "--config", str(config), env=at(sockets)).stdout.splitlines()
            assert len(told) == expected, text
        config.write_text('leader_group_id = "g"\n[control]\nsocket = "off"\n')
        done = run_cli("watch", "--once", "-f", str(config), env=at(sockets), check=False)
        assert done.returncode == 69
        assert "switches the control socket off" in done.stderr


def test_what_is_refused_is_said(sockets: Path) -> None:
    dummy = Dummy()
    dummy.refuses = True
    with serving(sockets / "x.sock", dummy), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.press("-")
        terminal.wait_for("changing to 3 shards: still 4 shards")
        terminal.press("\x03")
        assert terminal.wait() == 0
        assert terminal.settings() == terminal.before


def test_a_request_that_takes_long_holds_the_screen_not_up(sockets: Path) -> None:
    dummy = Dummy()
    dummy.gate.clear()
    with serving(sockets / "x.sock", dummy), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.press("+")
        assert dummy.scaling.wait(60)
        terminal.press("p")
        terminal.wait_for("the last key is still being processed")
        dummy.now = replace(dummy.now, delivered=7_654_321)
        terminal.wait_for("delivered 7,654,321")
        dummy.gate.set()
        terminal.wait_for("changing to 5 shards: done")
        terminal.press("q")
        assert terminal.wait() == 0
    assert dummy.asked == [("scale", 5, 10.0)]


def test_several_at_once_one_that_comes_and_one_that_goes(sockets: Path) -> None:
    one, two = named("one"), named("two")
    with serving(sockets / "one.sock", one), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for("one  LEADING for")
        with serving(sockets / "two.sock", two):
            terminal.wait_for(r"── harvesters ──[─ ]* 2 ──\n> one +LEADING[^\n]*\n  two +LEADING")
            terminal.press("\t")
            terminal.wait_for(r"\n> two [\s\S]*two  LEADING for")
            terminal.press("p")
            terminal.wait_for("pausing: done")
        terminal.press("x")
        terminal.wait_for(r"> two +no answer")
        with serving(sockets / "two.sock", two):
            terminal.press("x")
            terminal.wait_for(r"> two +PAUSED")
        terminal.press("q")
        assert terminal.wait() == 0
    assert (one.asked, two.asked) == ([], ["pause"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_the_terminal_as_it_was(number: signal.Signals, sockets: Path) -> None:
    with serving(sockets / "x.sock"), OnTerminal("watch", env=at(sockets)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.process.send_signal(number)
        assert terminal.wait() == 0
        assert terminal.settings() == terminal.before
        assert LEAVES_THE_SCREEN in terminal.raw


# -- without a terminal


def test_once_for_scripts_and_for_people(sockets: Path) -> None:
    one, two = named("one"), named("two")
    with serving(sockets / "one.sock", one), serving(sockets / "two.sock", two):
        said = [json.loads(line) for line in run_cli("watch", "--once", "--json", env=at(sockets)).stdout.splitlines()]
        assert [values.pop("socket") for values in said] == [str(sockets / "one.sock"), str(sockets / "two.sock")]
        assert [from_json(Status, values) for values in said] == [one.now, two.now]
        assert run_cli("watch", "--once", "--name", "two", env=at(sockets)).stdout == f"{status_line(two.now)}\n"
        path = str(sockets / "one.sock")
        assert run_cli("watch", "--once", "--socket", path).stdout == f"{status_line(one.now)}\n"


@contextmanager
def strange(path: Path, answer: bytes | None) -> Iterator[None]:
    """Listens like a harvester: of another version, or, without an answer, a frozen one."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                asked, _ = listening.accept()
                if answer is not None and asked.recv(1 << 16):
                    asked.sendall(answer)
                accepted.append(asked)

    accepted: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in accepted:
                each.close()


OLDER = b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(("answer", "said"), [(None, "does not answer"), (OLDER, "has a different version")])
def test_one_that_does_not_answer_hides_no_other(sockets: Path, answer: bytes | None, said: str) -> None:
    with strange(sockets / "a.sock", answer), serving(sockets / "b.sock", named("b")) as server:
        done = run_cli("watch", "--once", env=at(sockets), check=False)
        assert (done.returncode, done.stdout) == (69, f"{status_line(named('b').now)}\n")
        assert f"harvester: the harvester on {sockets / 'a.sock'} {said}" in done.stderr
        with RunningCli("watch", "--json", env=at(sockets)) as running:
            running.wait_for_line('"state": ?"leading"')
            assert said in running.output
            server.stop()
            assert running.wait() == 69


def test_one_key_for_scripts_and_for_people(sockets: Path) -> None:
    with serving(sockets / "x.sock"):
        said = json.loads(run_cli("watch", "--key", "a", "--once", "--json", env=at(sockets)).stdout)
        assert said.pop("socket") == str(sockets / "x.sock")
        assert from_json(KeyStatus, said) == replace(KEY, key="a")
        plain = run_cli("watch", "--key", "a", "--once", env=at(sockets)).stdout.splitlines()
        assert plain == ["key a", *(f"  {line}" for line in key_words(KEY))]


def test_lines_until_the_harvester_has_ended(sockets: Path) -> None:
    with RunningCli("watch", "--json", "--socket", str(sockets / "x.sock")) as running:
        assert running.wait() == 69
    with serving(sockets / "x.sock"):
        running = RunningCli("watch", "--json", env=at(sockets))
        with running:
            running.wait_for_line('"state": ?"leading"')
    with serving(sockets / "x.sock") as server, RunningCli("watch", "--json", env=at(sockets)) as running:
        running.wait_for_line('"state": ?"leading"')
        server.stop()
        assert running.wait() == 0
        assert "has ended" in running.output or "no harvester listens" in running.output


# -- commands


def test_what_the_commands_say(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy):

        def said(*args: str) -> str:
            return run_cli(*args, env=at(sockets)).stdout.strip()

        assert said("pause") == "billing-1: paused; 3 records on the wire still to be settled"
        assert said("pause") == "billing-1: was already paused; 3 records on the wire still to be settled"
        assert said("resume") == "billing-1: resumed; it is leading"
        assert said("resume", "--name", "x") == "billing-1: was not paused; it is leading"
        assert said("remark") == "billing-1: marks again from the head of the outbox"
        assert said("scale", "6", "--within", "2") == "billing-1: 6 shards instead of 4"
        assert said("scale", "6") == "billing-1: already has 6 shards"
        assert said("loglevel", "debug") == "billing-1: the log level is debug now"
        assert said("stop", "--within", "0") == "billing-1: stops"
    assert ("scale", 6, 2.0) in dummy.asked
    assert ("loglevel", "debug") in dummy.asked


def test_how_the_commands_fail(sockets: Path) -> None:
    def code(*args: str) -> tuple[int, str]:
        done = run_cli(*args, env=at(sockets), check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    assert code("pause") == (
        69,
        f"harvester: no harvester runs here (looked in {sockets})\n"
        "hint: run this as the user that runs the harvester, or as root; use --socket for one that listens elsewhere"
        " (control.socket)\n",
    )
    assert code("watch", "--once")[0] == 69
    assert code("watch", "--once", "--name", "x")[0] == 69
    dummy = Dummy()
    dummy.refuses = True
    with serving(sockets / "x.sock", dummy):
        assert code("remark") == (1, "harvester: it is standby: only a leader marks\nhint: ask the leader\n")
        assert code("scale", "2", "--within", "1")[0] == 1
        still = code("stop", "--within", "0.1")
        assert still[0] == 1
        assert "is still stopping after 0.1 s" in still[1]
        with serving(sockets / "y.sock"):
            several = code("pause")
            assert several[0] == 2
            assert f"running: {sockets / 'x.sock'}, {sockets / 'y.sock'}" in several[1]
    assert code("scale", "0")[0] == 2
    assert code("loglevel", "loud")[0] == 2
    assert code("pause", "--name", "x", "--socket", "y")[0] == 2
