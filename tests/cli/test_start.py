"""`harvester start` as a process: signals, what it prints, what it tells its manager, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.canaries import environment
from tests.support.cli import COMMAND, RunningCli, cli_environment
from tests.support.families import descendants
from tests.support.harvesting import Scene, alive, causal, children, log_lines, messages, shards_of, wait_leads
from tests.support.hooks import Fault
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]


def leading(scene: Scene, running: RunningCli) -> list[int]:
    """Wait until it leads and its shards have published something; returns their pids."""
    wait_leads(running)
    (row,) = scene.add(("warm-up", "1"))
    eventually(lambda: row not in scene.left(), what="a published record")
    return shards_of(running.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_gracefully(number: signal.Signals, scene: Scene) -> None:
    with scene.cli() as running:
        shards = leading(scene, running)
        assert len(shards) == 2
        assert running.stop(number) == 0
        assert not any(map(alive, shards))
        assert messages(running)[-1] == "stopped"
        assert "Traceback" not in running.output
    lines = [line for line in running.stdout if line]
    assert all(" test " in line and "in_flight=" in line for line in lines), lines
    assert " test stopped " in lines[-1]
    assert "delivered=1 " in lines[-1]
    eventually(lambda: scene.sessions("harvester") == [], what="the end of its sessions")


def test_ctrl_c_reaches_the_whole_process_group_and_still_stops_gracefully(scene: Scene) -> None:
    scene.plan.add(Fault(error="_MSG_TIMED_OUT", key="other", times=2))
    process = subprocess.Popen(
        [*COMMAND, "start", "-f", str(scene.config_file())],
        env=cli_environment(scene.plan.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        (row,) = scene.add(("a", "1"))
        scene.wait_left()
        del row
        scene.add(*(("a", str(number)) for number in range(2, 12)))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
        assert b"ended unexpectedly" not in errors
        assert b"Traceback" not in errors
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    published = [int(value or 0) for value in scene.published().get("a", [])]
    assert published == list(range(1, len(published) + 1))
    assert len(published) + len(scene.left()) == 11


def test_a_second_signal_ends_it_at_once(scene: Scene) -> None:
    with scene.plan.blocked("shard.purged") as reached, scene.cli(env=scene.plan.env) as running:
        wait_leads(running)
        scene.add(("a", "1"))
        reached()  # published and deleted; the shard does not get to say so, and the drain waits for it
        shards = shards_of(running.pid)
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)  # not the same one: two that are pending at once are one
        assert running.wait() == 130
        assert not any(map(alive, shards))
        assert "Traceback" not in running.output
    assert scene.published() == causal(("a",), 1)


def test_shards_end_with_a_supervisor_that_is_killed(scene: Scene) -> None:
    with scene.cli() as running:
        leading(scene, running)
        family = descendants(running.pid)
        assert len(family) == 4  # two shards, the elector, and the server that forked them
        for number in range(2, 30):
            scene.add(("a", str(number)))
        running.process.kill()
        eventually(lambda: not any(map(alive, family)), what="the end of its children")
    eventually(lambda: scene.sessions("harvester") == [], what="the end of its sessions")
    published = [int(value or 0) for value in scene.published().get("a", [])]
    assert published == list(range(2, len(published) + 2))


def test_closed_output_does_not_end_it(scene: Scene) -> None:
    process = subprocess.Popen(
        [*COMMAND, "start", "-f", str(scene.config_file())],
        env=cli_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        for number in range(1, 6):
            scene.add(("a", str(number)))
            scene.wait_left()
        (shard, *_) = shards_of(process.pid)
        os.kill(shard, signal.SIGKILL)  # something to log
        scene.add(*(("b", str(number)) for number in range(1, 6)))
        scene.add(*(("c", str(number)) for number in range(1, 6)))
        scene.wait_left()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert scene.published() == causal(("a", "b", "c"), 5)


def test_it_tells_its_manager(scene: Scene) -> None:
    address = scene.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)

        seen: list[str] = []

        def next_with(text: str) -> str:
            while True:
                message = manager.recv(65_536).decode()
                seen.append(message)
                if text in message:
                    return message

        env, away = {"NOTIFY_SOCKET": str(address)}, Proxy(scene.bootstrap, kafka=True)
        with away, scene.cli(env=env, base_kafka_config={"bootstrap.servers": away.address}) as running:
            waiting = next_with("STATUS=standby: ")  # it waits for Kafka, and the limit for a start moves on
            assert waiting.splitlines()[0] == "EXTEND_TIMEOUT_USEC=30000000"
            assert "READY=1" not in "".join(seen)
            away.open()
            ready = next_with("READY=1")
            assert f"MAINPID={running.pid}" in ready.splitlines()
            wait_leads(running)
            assert "delivered=0" in next_with("STATUS=leading")
            running.process.send_signal(signal.SIGTERM)
            assert next_with("STOPPING=1").splitlines()[0] == "STOPPING=1"
            assert running.wait() == 0


def test_until_empty_exits_when_everything_is_published(scene: Scene) -> None:
    for number in range(1, 31):
        scene.add(("a", str(number)), ("b", str(number)))
    with scene.cli("--until-empty", "--shards", "1", "--log-level", "warning") as running:
        assert running.wait() == 0
        assert log_lines(running) == []
        assert "delivered=60 " in running.stdout[-1]
        assert "shards=0/1" in running.stdout[-1]
    assert scene.left() == []
    assert scene.published() == causal(("a", "b"), 30)


def test_shards_that_die_again_and_again_end_it(scene: Scene) -> None:
    scene.add(("a", "1"))
    scene.plan.exit_at("shard.purged")
    scene.plan.exit_at("shard.reports")
    with scene.cli(env=scene.plan.env, restart_budget=2, restart_window="60s", shards=1) as running:
        assert running.wait() == 71
        errors = [line for line in running.stderr if not line.startswith("{")]
        assert errors[0] == "harvester: shards died 3 times within 60 s"
        assert errors[1].startswith("hint: ")
        assert "Traceback" not in running.output
        assert sum("ended unexpectedly (exit code 9)" in message for message in messages(running)) == 3


def test_a_shard_that_cannot_even_start_ends_it(scene: Scene) -> None:
    env = {**scene.plan.env, "HARVESTER_TEST_PLAN": str(scene.directory / "plan")}
    broken = scene.directory / "broken"
    broken.mkdir()
    (broken / "broken_hooks.py").write_text(
        "import os\n\n\ndef make():\n    if 'forkserver' in open('/proc/self/cmdline').read():\n        os._exit(7)\n"
        "    from harvester.failpoints import Failpoints\n    return Failpoints()\n"
    )
    env["HARVESTER_TEST_HOOKS"] = "broken_hooks:make"
    env["PYTHONPATH"] = f"{broken}{os.pathsep}{env['PYTHONPATH']}"
    with scene.cli(env=env, restart_budget=1, shards=1) as running:
        assert running.wait() == 71
        assert sum("exit code 7" in message for message in messages(running)) == 2


def test_shards_come_from_the_server_that_began_with_the_command(scene: Scene) -> None:
    with scene.cli() as running:
        leading(scene, running)
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in children(running.pid)]
        assert names == ["forkserver"]


def test_a_wrong_configuration_leaves_no_process(tmp_path: Path) -> None:
    mark = str(tmp_path)
    env = cli_environment({"HARVESTER_TEST_MARK": mark})
    command = [*COMMAND, "start", "-f", str(tmp_path / "none.toml")]
    assert subprocess.run(command, env=env, stderr=subprocess.DEVNULL, check=False).returncode == 78

    pids = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    assert [pid for pid in pids if mark.encode() in environment(pid)] == []


def test_help_needs_no_server_and_no_heavy_import() -> None:
    heavy = {"confluent_kafka", "psycopg", "harvester.config"}
    probe = f"""if True:
        import sys
        from harvester_cli.main import app
        sys.argv = ["harvester", "start", "--help"]
        try:
            app()
        except SystemExit as end:
            assert end.code == 0
        assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
    """
    done = subprocess.run(
        [COMMAND[0], "-c", probe], env=cli_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--until-empty" in done.stdout
