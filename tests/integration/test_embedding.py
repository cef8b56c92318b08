"""The harvester as an object in somebody else's program."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from harvester import (
    FakeGroup,
    Harvester,
    HarvesterError,
    LeaderAcquired,
    LeaderFenced,
    LeaderRevoked,
    MeterRead,
    State,
)
from harvester.errors import ConfigurationError, SchemaError
from tests.support.cli import cli_environment
from tests.support.client_threads import OF_CLIENTS
from tests.support.harvesting import Embedded, Scene, causal, children
from tests.support.hooks import Plan
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]


def leads(harvester: Harvester) -> bool:
    """All that the object says about it, in agreement."""
    said = {harvester.is_leader, harvester.leader_id is not None, harvester.term is not None}
    assert len(said) == 1
    return said.pop()


def test_states_from_the_beginning_to_the_end(scene: Scene, plan: Plan) -> None:
    group = FakeGroup()
    harvester = Harvester(scene.config(), group=group)
    assert str(harvester.state) == "created"
    assert not leads(harvester)
    assert harvester.in_flight == 0
    assert harvester.status().shards == ()
    with harvester:
        eventually(lambda: harvester.state is State.STANDBY, what="standby")
        assert not leads(harvester)
        group.elect()
        eventually(lambda: harvester.state is State.LEADING, what="leading")
        assert leads(harvester)
        assert harvester.term == scene.term() == 1
        with plan.blocked("shard.purged") as reached:
            scene.add(("a", "1"))
            reached()
            eventually(lambda: harvester.in_flight == 1, what="a record in flight")
            assert harvester.status().in_flight == 1
        group.fence()
        assert not leads(harvester)
        eventually(lambda: harvester.state is State.FENCED, what="fenced")
        group.elect()
        eventually(lambda: harvester.state is State.LEADING, what="leading again")
        assert harvester.term == 2
        group.revoke()
        assert not leads(harvester)
        eventually(lambda: harvester.state is State.STANDBY, what="standby again")
        assert harvester.wait(0) is False
    assert str(harvester.state) == "stopped"
    assert harvester.wait(0) is True
    harvester.stop()
    assert not leads(harvester)


def test_it_is_started_once(scene: Scene) -> None:
    harvester = Harvester(scene.config(shards=1), group=FakeGroup())
    with harvester, pytest.raises(HarvesterError, match="already been started"):
        harvester.start()
    with pytest.raises(HarvesterError, match="already been started"):
        harvester.start()
    never = Harvester(scene.config(shards=1), group=FakeGroup())
    never.stop()
    never.stop()
    assert never.wait(0) is True


def test_what_the_kafka_client_refuses_is_raised_by_start(scene: Scene) -> None:
    given = scene.config(shards=1)
    options = {**given.base_kafka_config, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
    harvester = Harvester(given.model_copy(update={"base_kafka_config": options}), group=FakeGroup())
    with pytest.raises(ConfigurationError, match=r"sasl\.username and sasl\.password must be set"):
        harvester.start()
    harvester.stop()
    assert harvester.wait(0) is True


def test_it_runs_in_an_event_loop_which_goes_on_while_it_waits_and_stops(scene: Scene) -> None:
    async def main() -> Harvester:
        async with Harvester(scene.config(shards=1), group=FakeGroup()) as harvester:
            assert await harvester.wait_async(0.01) is False
            waiting = asyncio.create_task(harvester.wait_async())
            await asyncio.sleep(0)
            assert not waiting.done()  # and the loop was not held up
            harvester.stop_soon()
            assert await waiting is True
            waiting = asyncio.create_task(harvester.wait_async())
            waiting.cancel()
        return harvester

    assert asyncio.run(main()).state is State.STOPPED


def test_wait_async_raises_what_ended_it(scene: Scene) -> None:
    async def main() -> None:
        scene.db.execute("DROP TABLE outbox_term")
        async with Harvester(scene.config(), group=FakeGroup()) as harvester:
            await harvester.wait_async(30)

    with pytest.raises(SchemaError, match="outbox_term"):
        asyncio.run(main())


def test_several_threads_may_stop_it(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_for(LeaderAcquired)
        threads = [threading.Thread(target=running.harvester.stop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert running.leadership() == ["LeaderAcquired", "LeaderRevoked"]


def test_an_event_handler_may_stop_it(scene: Scene) -> None:
    with scene.embedded(shards=1) as running:
        running.on_event = lambda event: running.harvester.stop() if isinstance(event, LeaderAcquired) else None
        assert running.harvester.wait(30)


def test_wait_raises_what_ended_it(scene: Scene) -> None:
    scene.db.execute("DROP TABLE outbox_term")
    with Harvester(scene.config(shards=1), group=FakeGroup()) as harvester:
        with pytest.raises(SchemaError, match="outbox_term"):
            harvester.wait(30)
        assert harvester.state is State.FAILED
        with pytest.raises(SchemaError):
            harvester.wait(0)


def test_leader_ids_are_never_reused(scene: Scene) -> None:
    group = FakeGroup()
    with scene.embedded(group=group, shards=1) as running:
        for number in range(1, 101):
            group.elect()
            acquired = running.wait_for(LeaderAcquired, number)
            assert running.harvester.leader_id == acquired.leader_id
            if number % 10:
                group.revoke()
            else:
                group.fence()
                eventually(lambda: running.harvester.state is State.FENCED, what="fenced")
            assert running.harvester.leader_id is None
        eventually(lambda: len(running.leadership()) == 200, what="all events")
    acquired_all = running.of(LeaderAcquired)
    assert len({event.leader_id for event in acquired_all}) == 100
    assert [event.term for event in acquired_all] == list(range(1, 101))
    expected = ["LeaderAcquired", "LeaderRevoked"] * 9 + ["LeaderAcquired", "LeaderFenced"]
    assert running.leadership() == expected * 10


def test_a_revoke_waits_for_its_handler_and_a_fence_does_not(scene: Scene) -> None:
    group = FakeGroup()
    entered, go_on = threading.Event(), threading.Event()

    def slow(event: object) -> None:
        if isinstance(event, LeaderRevoked | LeaderFenced):
            entered.set()
            assert go_on.wait(30)

    with scene.embedded(group=group, shards=1) as running:
        running.on_event = slow
        group.elect()
        running.wait_for(LeaderAcquired)
        revoking = threading.Thread(target=group.revoke)
        revoking.start()
        assert entered.wait(30)
        revoking.join(0.2)
        assert revoking.is_alive()
        go_on.set()
        revoking.join(30)
        assert not revoking.is_alive()

        entered.clear()
        go_on.clear()
        group.elect()
        running.wait_for(LeaderAcquired, 2)
        group.fence()
        assert entered.wait(30)  # the handler hangs …
        group.elect()
        eventually(lambda: running.harvester.term == 3, what="the next term")  # … and nothing waits for it
        scene.add(("a", "1"))
        scene.wait_left()
        go_on.set()
        running.wait_for(LeaderAcquired, 3)


def test_a_handler_that_hangs_does_not_hold_a_revoke_for_ever(scene: Scene) -> None:
    group = FakeGroup(revoke_within_s=0.5)
    go_on = threading.Event()
    with scene.embedded(group=group, shards=1) as running:
        running.on_event = lambda event: isinstance(event, LeaderRevoked) and go_on.wait(30)
        group.elect()
        running.wait_for(LeaderAcquired)
        group.revoke()
        assert not go_on.is_set()
        assert not running.harvester.is_leader
        go_on.set()


def test_a_slow_or_failing_handler_stalls_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def bad(event: object) -> None:
        if isinstance(event, LeaderAcquired):
            assert go_on.wait(30)
            raise ValueError("a mistake of the host")

    with caplog.at_level(logging.ERROR, "harvester"), scene.embedded(min_metrics_interval="10ms") as running:
        running.on_event = bad
        for number in range(1, 21):
            scene.add(("a", str(number)))
        scene.wait_left()
        assert running.of(MeterRead) == []  # in order: they wait behind the slow one
        go_on.set()
        reading = running.wait_for(MeterRead)
    assert reading.name == "test"
    assert 1 <= reading.interval_count <= reading.total_count <= 20
    assert running.leadership() == ["LeaderAcquired", "LeaderRevoked"]
    assert any("the event handler failed on LeaderAcquired" in record.message for record in caplog.records)
    assert "a mistake of the host" in caplog.text
    assert scene.published() == causal(("a",), 20)


def test_every_line_goes_to_the_hosts_logger_with_name_and_shard(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    records: list[logging.LogRecord] = []
    logger = logging.Logger("host", logging.DEBUG)
    logger.addHandler(_Collector(records))
    harvester = Harvester(scene.config(name="billing"), group=FakeGroup(elected=True), logger=logger)
    with Embedded(harvester).run():
        eventually(lambda: harvester.state is State.LEADING, what="leading")
        scene.db.execute("ALTER TABLE outbox ALTER kafka_header_values DROP NOT NULL")
        scene.add(("a", "1"), topic="no topic")
        scene.wait_left()
        eventually(lambda: any("quarantine" in record.getMessage() for record in records), what="the word of it")
        pids = [shard.pid for shard in harvester.status().shards]
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: any("ended unexpectedly" in record.getMessage() for record in records), what="the death")
    lines = [record.getMessage() for record in records]
    assert all(line.startswith(("[billing] ", "[billing[0]] ", "[billing[1]] ")) for line in lines), lines
    assert any(line.startswith("[billing[") and "quarantine" in line for line in lines)
    assert any(line.startswith("[billing[0]] ended unexpectedly") for line in lines)
    assert "[billing] stopped" in lines
    assert capfd.readouterr().err == ""


class _Collector(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


_SCRIPT = """
import signal
import sys

from harvester import Config, Harvester, LeaderAcquired

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
print("begin", flush=True)
harvester = Harvester(Config.model_validate_json(sys.argv[1]), until_empty=True)
harvester.start()
assert harvester.wait(60)
after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
assert before == after, (before, after)
print("end", flush=True)
"""


def script(scene: Scene, text: str, **given: object) -> subprocess.CompletedProcess[str]:
    """Run a program of its own file with the configuration as its argument."""
    import json

    path = scene.directory / "service.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, str(path), json.dumps(scene.settings(**given))],
        env=cli_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_script_without_a_main_guard(scene: Scene) -> None:
    scene.add(("a", "1"), ("b", "1"))
    done = script(scene, _SCRIPT)
    assert (done.returncode, done.stdout) == (0, "begin\nend\n"), done.stderr
    assert scene.published() == causal(("a", "b"), 1)


_NO_MORE_THREADS = """
import atexit
import threading


def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")


atexit.register(setattr, threading.Thread, "start", refuse)
"""


@pytest.mark.parametrize("at_exit", ["", _NO_MORE_THREADS], ids=["3.11", "3.12"])
def test_a_program_that_ends_without_stopping_it_leaves_nothing_behind(scene: Scene, at_exit: str) -> None:
    """Python 3.12 starts no thread any more when functions of `atexit` run."""
    scene.add(("a", "1"))
    text = _SCRIPT.replace("until_empty=True", "until_empty=False").replace(
        "assert harvester.wait(60)", "while harvester.status().delivered < 1: harvester.wait(0.02)"
    )
    text += f"print(*(shard.pid for shard in harvester.status().shards))\n{at_exit}"
    done = script(scene, text)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    assert admin.describe_consumer_groups([scene.group])[scene.group].result(30).members == []
    *_, pids = done.stdout.splitlines()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.split())
    eventually(lambda: scene.sessions("harvester") == [], what="the end of its sessions")
    assert scene.left() == []


@pytest.mark.parametrize("brokers", ["there", "away"])
def test_the_host_has_no_client_of_kafka(scene: Scene, brokers: str) -> None:
    """OpenSSL frees at the end of a process what a client that makes a connection still uses.

    The elector and the shards have clients; they end without freeing anything.
    """
    given = {} if brokers == "there" else {"base_kafka_config": {"bootstrap.servers": "127.0.0.1:1"}}
    text = f"""
import atexit, sys
{OF_CLIENTS}
from harvester import Config, Harvester

harvester, seen = Harvester(Config.model_validate_json(sys.argv[1])), set()
atexit.register(lambda: print(seen.union(of_clients())))
with harvester:
    while not (harvester.is_leader or harvester.status().problem):
        seen.update(of_clients())
        harvester.wait(0.02)
    seen.update(of_clients())
"""
    done = script(scene, text, **given)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_it_ends_by_itself_when_no_thread_starts_any_more(scene: Scene) -> None:
    """As with Python 3.12 once the host's main thread has ended, while others go on."""
    refused = _NO_MORE_THREADS.replace("atexit.register(setattr, ", "setattr(").replace("import atexit\n", "")
    text = _SCRIPT.replace(
        "assert harvester.wait(60)",
        f"""
while not harvester.is_leader: harvester.wait(0.02)
{refused}
assert harvester.status().backlog is None
assert harvester.wait(60)
""",
    )
    scene.add(("a", "1"))
    text = text.replace("harvester.start()", "harvester.start()\nharvester.pause()").replace(
        "assert harvester.wait", "harvester.resume()\nassert harvester.wait"
    )
    done = script(scene, text)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert scene.published() == causal(("a",), 1)


def test_nothing_is_left_after_a_stop(scene: Scene) -> None:
    """No process, thread or descriptor; compared from the second run on, when what is made once is there."""

    def run() -> None:
        with scene.embedded() as running:
            running.wait_leading()
            running.harvester.status()
            scene.add(("a", "1"))
            scene.wait_left()

    def held() -> tuple[list[str], list[int], int]:
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        return threads, children(os.getpid()), len(list(Path("/proc/self/fd").iterdir()))

    before = set(threading.enumerate())
    run()
    assert set(threading.enumerate()) <= before  # one that another test has left may end meanwhile
    first = held()
    run()
    run()
    eventually(lambda: held() == first, 10, f"threads, children and descriptors as before {first}; now {held()}")
