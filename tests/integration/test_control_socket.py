"""A control socket, really listened on: who is let in, what is bounded, what is left by those that died."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harvester.control import sockets as control_sockets
from harvester.control.client import Connection, Feeds, find, running
from harvester.control.protocol import (
    ControlError,
    NoHarvester,
    NoPlace,
    NotUnderstood,
    SeveralHarvesters,
)
from harvester.control.server import ControlServer, may_control
from harvester.control.sockets import Listener, is_live, listen, listen_in_first
from tests.support.control import Dummy, at, serving
from tests.support.wait import eventually

pytest_plugins = ["tests.support.sockets"]

UID = os.geteuid()


def left_by_a_dead_process(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


def test_every_command_reaches_the_harvester(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy), Connection(sockets / "x.sock") as connection:
        assert connection.status() == dummy.now
        told = {"changed": True, "name": "billing-1", "state": "paused", "in_flight": 3, "shards": 4}
        assert connection.ask("pause") == told
        assert connection.ask("pause") == {**told, "changed": False}
        assert connection.status() == dummy.now
        assert connection.ask("resume") == {**told, "state": "leading"}
        assert connection.ask("remark")["state"] == "leading"
        assert connection.ask("scale", shards=4, within_s=1.0)["changed"] is False
        scaled = connection.ask("scale", shards=6, within_s=1e9)
        assert (scaled["before"], scaled["shards"]) == (4, 6)
        connection.ask("loglevel", level="debug")
        connection.ask("stop")
    assert dummy.asked == [
        *("pause", "pause", "resume", "remark"),
        ("scale", 6, 60.0),
        ("loglevel", "debug"),
        "stop",
    ]


def test_a_refusal_comes_back_with_its_hint(sockets: Path) -> None:
    dummy = Dummy()
    dummy.refuses = True
    with serving(sockets / "x.sock", dummy), Connection(sockets / "x.sock") as connection:
        with pytest.raises(ControlError, match="only a leader marks") as refused:
            connection.ask("remark")
        assert (refused.value.hint, refused.value.exit_code) == ("ask the leader", 1)
        with pytest.raises(ControlError, match=r"still 4 shards: .* within 2 s"):
            connection.ask("scale", shards=2, within_s=2.0)
        with pytest.raises(ControlError, match="internal error: LookupError"):
            connection.ask("loglevel", level="debug")
        assert connection.status() == dummy.now


def test_one_command_at_a_time_but_anybody_may_look_and_stop(sockets: Path) -> None:
    dummy = Dummy()
    dummy.gate.clear()
    path = sockets / "x.sock"
    with serving(path, dummy), ThreadPoolExecutor(1) as pool, Connection(path) as other:
        scaled = pool.submit(
            lambda: Connection(path).ask(
                "scale",
                shards=6,
                within_s=1.0,
            )
        )
        assert dummy.scaling.wait(30)
        with pytest.raises(ControlError, match="another command is under way"):
            other.ask("pause")
        assert other.status() == dummy.now
        other.ask("stop")
        dummy.gate.set()
        assert scaled.result(30)["shards"] == 6


# -- who is let in


def test_the_socket_is_its_owners_alone(sockets: Path) -> None:
    with serving(sockets / "deep" / "x.sock"):
        assert stat.S_IMODE((sockets / "deep").stat().st_mode) == 0o700
        assert stat.S_IMODE((sockets / "deep" / "x.sock").stat().st_mode) == 0o600
    assert not (sockets / "deep" / "x.sock").exists()


def test_the_same_user_and_root_may_control() -> None:
    assert may_control(1000, 1000)
    assert may_control(0, 1000)
    assert not may_control(1001, 1000)
    assert not may_control(1001, 0)


@pytest.mark.skipif(UID != 0, reason="only root can be somebody else")
def test_another_user_is_turned_away_even_where_the_directory_lets_him_in(sockets: Path) -> None:
    dummy = Dummy()
    path = sockets / "x.sock"
    with serving(path, dummy):
        sockets.chmod(0o711)
        path.chmod(0o666)
        program = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "try: s.sendall(b'POST /v2/pause HTTP/1.1\\r\\n\\r\\n')\n"
            "except BrokenPipeError: pass\n"
            "print(s.recv(65536).decode())"
        )
        command = [sys.executable, "-c", program, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "uid 65534 may not control this harvester" in done.stdout
    assert dummy.asked == []


# -- what is bounded


def exchange(path: Path, sent: bytes) -> bytes:
    """What comes back until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(path))
        client.sendall(sent)
        return client.makefile("rb").read()


def test_a_client_that_sends_nonsense_is_told_and_hung_up_on(sockets: Path) -> None:
    path = sockets / "x.sock"
    with serving(path):
        assert exchange(path, b"hello\n").startswith(b"400 ")
        assert b" 414 " in exchange(path, b"x" * 70_000)
        long = b"POST /v2/pause HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"
        assert exchange(path, long).startswith(b"HTTP/1.1 413 ")
        close = b"Connection: close\r\nContent-Length: 5\r\n\r\n"
        assert exchange(path, b"POST /v2/scale HTTP/1.1\r\n" + close + b"hello").startswith(b"HTTP/1.1 400 ")
        assert exchange(path, b"GET /v2/pause HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 405 ")


def test_curl_can_ask(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy):
        curl = ["curl", "--silent", "--fail", "--unix-socket", str(sockets / "x.sock")]
        shown = subprocess.run([*curl, "http://localhost/v2/status"], capture_output=True, check=True)
        assert json.loads(shown.stdout)["name"] == "billing-1"
        told = subprocess.run(
            [*curl, "--json", '{"shards": 6, "within_s": 2}', "http://localhost/v2/scale"],
            capture_output=True,
            check=True,
        )
        assert json.loads(told.stdout)["shards"] == 6
    assert dummy.asked == [("scale", 6, 2.0)]


# -- other versions


def test_an_answer_that_is_no_http_is_named(sockets: Path) -> None:
    """From a server that takes the first line of the request for a request, refuses that, and hangs up."""
    answer = b'{"error":"a line is no JSON"}\n'

    def serve(listener: Listener) -> None:
        client, _ = listener.socket.accept()
        with client:
            client.recv(65_536)
            client.sendall(answer)

    path = sockets / "x.sock"
    listener = listen(path, UID)

    def answered() -> threading.Thread:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        return thread

    once = answered()
    with Connection(path) as connection, pytest.raises(NotUnderstood, match="is not HTTP"):
        connection.status()
    once.join()
    again, feeds = answered(), Feeds(lambda: [path], 0.1, lambda: None)
    eventually(lambda: feeds.latest()[0].trouble, what="a word about it")
    assert "is not HTTP" in str(feeds.latest()[0].trouble)
    feeds.stop()
    again.join()
    listener.close()


def test_another_version_of_the_protocol_is_named(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harvester.control.client.PREFIX", "/v3/")
    with (
        serving(sockets / "x.sock"),
        Connection(sockets / "x.sock") as connection,
        pytest.raises(NotUnderstood, match="has a different version"),
    ):
        connection.status()


# -- following


def test_a_snapshot_now_and_then_until_it_ends(sockets: Path) -> None:
    dummy = Dummy()
    with serving(sockets / "x.sock", dummy) as serves, Connection(sockets / "x.sock") as connection:
        snapshots = connection.watch(0.05)
        assert next(snapshots) == dummy.now
        dummy.pause()
        changed = dummy.now
        while next(snapshots) != changed:
            pass
        serves.stop()
        with pytest.raises(NoHarvester, match="has ended"):
            list(snapshots)


def test_who_follows_and_leaves_frees_its_place(sockets: Path) -> None:
    with serving(sockets / "x.sock") as serves:
        with Connection(sockets / "x.sock") as connection:
            next(connection.watch(0.05))
            assert len(serves._clients) == 1
        eventually(lambda: not serves._clients, what="its thread's end")


def test_clients_that_never_say_anything_hold_nobody_up(sockets: Path) -> None:
    path = sockets / "x.sock"
    with serving(path):
        silent = [Connection(path) for _ in range(ControlServer.most_clients - 1)]
        with Connection(path) as last:
            assert last.status()
            with pytest.raises(ControlError, match="clients are already connected"):
                Connection(path).status()
            silent.pop().close()

            def is_let_in() -> bool:
                with Connection(path) as another:
                    try:
                        return another.status() is not None
                    except ControlError:
                        return False

            eventually(is_let_in, what="a place for another one")
        for connection in silent:
            connection.close()


def test_a_client_that_does_not_read_is_hung_up_on(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlServer, "takes_s", 0.2)
    path = sockets / "x.sock"
    with serving(path) as serves, socket.socket(socket.AF_UNIX) as stuck, Connection(path) as other:
        stuck.settimeout(30)
        stuck.connect(str(path))
        asked = b"GET /v2/status HTTP/1.1\r\n\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 - when its buffers are full
            while True:
                stuck.sendall(asked * 100)
        assert other.status()
        eventually(lambda: len(serves._clients) == 1, what="its thread's end")


def test_who_says_nothing_is_hung_up_on_but_not_who_has_stopped_it(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one waits for the end, and would take it for that."""
    path = sockets / "x.sock"
    with serving(path), Connection(path) as stops, Connection(path) as silent:
        assert stops.status()
        assert silent.status()
        monkeypatch.setattr(ControlServer, "idle_s", 1.0)  # from their next requests on
        stops.ask("stop")
        silent.status()  # later than the other one, so that it is hung up on later
        assert silent.wait_ended(60)
        assert not stops.wait_ended(0.5)


def test_a_client_for_whom_there_is_no_thread_is_sent_away(sockets: Path) -> None:
    path = sockets / "x.sock"
    with serving(path) as serves:
        before = threading.stack_size(1 << 47)  # more than there is
        try:
            with Connection(path) as refused, pytest.raises(ControlError, match="no thread for one more client"):
                refused.status()
        finally:
            threading.stack_size(before)
        assert serves._clients == {}
        with Connection(path) as connection:
            assert connection.status()


def test_a_stop_ends_every_thread_and_hangs_up(sockets: Path) -> None:
    path = sockets / "x.sock"
    with serving(path) as serves:
        connections = [Connection(path) for _ in range(3)]
        for connection in connections:
            connection.status()
        threads = [serves, *(thread for thread, _ in serves._clients.values())]
        assert not connections[0].wait_ended(0.05)
    assert all(connection.wait_ended(30) for connection in connections)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(NoHarvester):
        connections[0].status()


# -- sockets of others


def test_what_a_dead_process_left_is_replaced(sockets: Path) -> None:
    left_by_a_dead_process(sockets / "x.sock")
    assert not is_live(sockets / "x.sock")
    with serving(sockets / "x.sock"):
        assert is_live(sockets / "x.sock")


def test_a_live_one_is_left_alone(sockets: Path) -> None:
    with serving(sockets / "x.sock"):
        with pytest.raises(NoPlace, match="another harvester listens") as taken:
            listen(sockets / "x.sock", UID)
        assert "its own name" in str(taken.value.hint)
        with Connection(sockets / "x.sock") as connection:
            assert connection.status()


def test_a_stopped_process_still_has_its_socket(sockets: Path) -> None:
    program = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(0); print('listens', flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(sockets / "x.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            process.send_signal(signal.SIGSTOP)
            for _ in range(3):  # more than its backlog
                with pytest.raises(NoPlace, match="another harvester listens"):
                    listen(sockets / "x.sock", UID)
            with pytest.raises(NoHarvester, match="does not answer"):
                Connection(sockets / "x.sock", 0.2).status(0.2)
        finally:
            process.kill()


def _compete(folder: Path, begin: threading.Event, wins: multiprocessing.Queue[int]) -> None:
    begin.wait()
    try:
        kept = listen(folder / "x.sock", os.geteuid())
    except NoPlace:
        wins.put(0)
        return
    wins.put(os.getpid())
    time.sleep(60)
    kept.close()


def test_of_several_that_start_at_once_one_wins(sockets: Path) -> None:
    """None takes another's new socket for what a dead one has left."""
    context = multiprocessing.get_context("spawn")
    left_by_a_dead_process(sockets / "x.sock")
    begin, wins = context.Event(), context.Queue()
    processes = [context.Process(target=_compete, args=(sockets, begin, wins)) for _ in range(4)]
    for process in processes:
        process.start()
    try:
        begin.set()
        winners = [pid for pid in (wins.get(timeout=60) for _ in processes) if pid]
        assert len(winners) == 1
        assert is_live(sockets / "x.sock")
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_listener_removes_only_its_own_file(sockets: Path) -> None:
    first = listen(sockets / "x.sock", UID)
    (sockets / "x.sock").unlink()
    second = listen(sockets / "x.sock", UID)
    first.close()
    assert is_live(sockets / "x.sock")
    second.close()
    assert not (sockets / "x.sock").exists()


def test_what_others_left_in_the_common_directory_is_swept_away(sockets: Path) -> None:
    left_by_a_dead_process(sockets / "dead.sock")
    (sockets / "file.sock").touch()
    with serving(sockets / "live.sock"):
        listener = listen_in_first([sockets], "x.sock", UID)
        listener.close()
    assert sorted(path.name for path in sockets.iterdir()) == ["file.sock"]


def test_a_directory_that_others_can_write_to_is_refused(sockets: Path) -> None:
    (sockets / "open").mkdir()
    (sockets / "open").chmod(0o777)
    (sockets / "elsewhere").mkdir(mode=0o700)
    if UID == 0:
        os.chown(sockets / "elsewhere", 65534, 65534)
        with pytest.raises(NoPlace, match="only this user can write"):
            listen(sockets / "elsewhere" / "x.sock", UID)
    with pytest.raises(NoPlace, match="only this user can write"):
        listen(sockets / "open" / "x.sock", UID)
    with pytest.raises(NoPlace, match="no place for the control socket"):
        listen_in_first([sockets / "open", sockets / "none" / "such"], "x.sock", UID)
    listener = listen_in_first([sockets / "open", sockets], "x.sock", UID)
    assert listener.path == sockets / "x.sock"
    listener.close()


def test_what_is_no_socket_is_not_removed(sockets: Path) -> None:
    (sockets / "x.sock").write_text("precious")
    with pytest.raises(NoPlace, match="is not a socket"):
        listen(sockets / "x.sock", UID)
    with pytest.raises(NoPlace, match="too long"):
        listen(sockets / ("x" * 107), UID)
    assert (sockets / "x.sock").read_text() == "precious"


def test_a_lock_that_is_held_is_not_waited_for_for_ever(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_sockets, "_LOCKED_S", 0.05)
    with control_sockets._locked(sockets), pytest.raises(NoPlace, match="holds the lock"):
        listen(sockets / "x.sock", UID)


# -- finding them


def test_the_only_one_is_found_and_several_have_to_be_named(sockets: Path) -> None:
    left_by_a_dead_process(sockets / "dead.sock")
    with pytest.raises(NoHarvester, match="no harvester runs here") as none:
        find(None, None, at(sockets))
    assert none.value.exit_code == 69
    one, two = sockets / "one.sock", sockets / "two.sock"
    with serving(one):
        assert find(None, None, at(sockets)) == one
        with serving(two):
            assert running(at(sockets)) == [one, two]
            assert find("two", None, at(sockets)) == two
            assert find(None, two, at(sockets)) == two
            with pytest.raises(SeveralHarvesters, match=f"{one}, {two}") as several:
                find(None, None, at(sockets))
            assert several.value.exit_code == 2
            with pytest.raises(NoHarvester, match="no harvester named 'three'"):
                find("three", None, at(sockets))


def test_nobody_there(sockets: Path) -> None:
    with pytest.raises(NoHarvester, match="no harvester listens on"):
        Connection(sockets / "x.sock")
    assert isinstance(listen(sockets / "x.sock", UID), Listener)
