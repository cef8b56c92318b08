"""Runs both servers together: `up`, `down`, `status`, and stopping or starting one of them for fault tests."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harvester.errors import StackError
from harvester.stack import java, kafka, postgres
from harvester.stack.java import broker_jars
from harvester.stack.processes import ProcessId, end
from harvester.stack.state import (
    SERVERS,
    Server,
    ServerName,
    ServerStatus,
    StackInfo,
    StackOptions,
    StackState,
    StackStatus,
    locked,
    read,
    write,
)

Progress = Callable[[str], None]
_ATTEMPTS = 3


def up(directory: Path, options: StackOptions | None = None, *, progress: Progress = lambda _: None) -> StackInfo:
    """Make the stack in `directory` run, creating it if necessary; returns once both servers answer.

    Idempotent, and safe to call from several processes at once. `progress` receives lines for people, from several
    threads. If one does not come up, raises StackError with the end of the server's log; the other keeps running.
    """
    options = options or StackOptions()
    directory = directory.absolute()
    with locked(directory):
        state = read(directory)
        if state is None:
            state = StackState(durable=options.durable, kafka_heap_mb=options.kafka_heap_mb)
            state.postgres_bin = str(options.postgres_bin.absolute()) if options.postgres_bin else None
        _adopt_given(state, options)
        return _start(directory, state, SERVERS, options.timeout_s, progress)


def down(directory: Path, *, delete: bool = False) -> list[ServerName]:
    """Stop what `up` started here; returns what was running. With `delete`, the data and the directory are removed,
    too.

    A process that merely has a pid of ours, and a user's own server, are left alone. Having nothing to do is not an
    error.
    """
    directory = directory.absolute()
    if not (directory / "state.json").is_file():
        return []
    with locked(directory):
        state = read(directory)
        if state is None:
            return []
        stopped = _stop(directory, state, SERVERS, kill=delete)  # nothing to save, since it is deleted
        if delete:
            homes = [Path(server.home) for server in state.servers.values() if server.home]
            for path in (*homes, directory):
                shutil.rmtree(path, ignore_errors=True)
        return stopped


def stop(directory: Path, server: ServerName, *, kill: bool = False) -> bool:
    """Stop one server of the stack, cleanly or (`kill`) by SIGKILL; False if it was not running."""
    directory = directory.absolute()
    with locked(directory):
        return bool(_stop(directory, _existing(directory), (server,), kill=kill))


def start(directory: Path, server: ServerName, *, timeout_s: float = 90.0) -> StackInfo:
    """Start one server of the stack again, at its previous address, and wait until it answers."""
    directory = directory.absolute()
    with locked(directory):
        return _start(directory, _existing(directory), (server,), timeout_s, lambda _: None)


def status(directory: Path) -> StackStatus:
    """The state of the stack; does not wait, and only checks whether the servers are there."""
    directory = directory.absolute()
    state = read(directory) or StackState()
    return StackStatus(directory, tuple(_server_status(name, state.servers[name]) for name in SERVERS))


def info(directory: Path, state: StackState) -> StackInfo:
    """The addresses of a stack whose servers have been started or given."""
    pg, broker = state.servers["postgres"], state.servers["kafka"]
    socket_dir = Path(pg.home) / "run" if pg.home else None
    return StackInfo(
        directory=directory,
        dsn=_address("postgres", pg) or "",
        bootstrap=_address("kafka", broker) or "",
        socket_dir=socket_dir if socket_dir and socket_dir.is_dir() else None,
        postgres_pid=pg.process.pid if pg.process else None,
        kafka_pid=broker.process.pid if broker.process else None,
        postgres_log=pg.log,
        kafka_log=broker.log,
    )


def free_ports(count: int, preferred: list[int]) -> list[int]:
    """Ports that nobody listens on: the preferred ones if all are free, otherwise others."""
    for candidates in (preferred, [0] * count):
        probes: list[socket.socket] = []
        try:
            for port in candidates:
                probe = socket.socket()
                probes.append(probe)
                # As the servers do: a port whose connections are still in TIME_WAIT counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            if len(probes) == count:
                return [probe.getsockname()[1] for probe in probes]
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise StackError("no free port on 127.0.0.1")


class _PortTaken(StackError):
    """The server ended because another process took its port in the meantime."""


def _adopt_given(state: StackState, options: StackOptions) -> None:
    given: dict[ServerName, str | None] = {"postgres": options.dsn, "kafka": options.bootstrap}
    for name, address in given.items():
        server = state.servers[name]
        if address is not None and server.alive:
            raise StackError(f"the stack already runs its own {name}", hint="run `harvester stack down` first")
        if address is not None:
            server.given, server.process = address, None


def _address(name: ServerName, server: Server) -> str | None:
    if server.given is not None:
        return server.given
    if not server.ports:
        return None
    return postgres.dsn(server.ports[0]) if name == "postgres" else kafka.bootstrap(server.ports[0])


def _server_status(name: ServerName, server: Server) -> ServerStatus:
    if server.given is not None:
        return ServerStatus(name, "given", server.given, None, None)
    pid = server.process.pid if server.process is not None and server.alive else None
    return ServerStatus(name, "stopped" if pid is None else "running", _address(name, server), pid, server.log)


def _existing(directory: Path) -> StackState:
    state = read(directory)
    if state is None:
        raise StackError(f"there is no stack in {directory}", hint="start one with `harvester stack up`")
    return state


def _start(
    directory: Path, state: StackState, names: tuple[ServerName, ...], timeout_s: float, progress: Progress
) -> StackInfo:
    saving = threading.Lock()

    def save() -> None:
        with saving:
            write(directory, state)

    def start_one(name: ServerName) -> None:
        server = state.servers[name]
        if server.given is not None or server.alive:
            return
        # A free port can be taken before the server binds it; then new ones are chosen.
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if name == "postgres":
                    _start_postgres(directory, state, timeout_s, progress, save)
                else:
                    _start_kafka(directory, state, timeout_s, progress, save)
            except _PortTaken as error:
                if attempt == _ATTEMPTS:
                    raise StackError(error.message) from error
            else:
                return

    save()
    with ThreadPoolExecutor(max_workers=len(names), thread_name_prefix="stack") as pool:
        for done in [pool.submit(start_one, name) for name in names]:
            done.result()
    save()
    return info(directory, state)


def _start_postgres(
    directory: Path, state: StackState, timeout_s: float, progress: Progress, save: Callable[[], None]
) -> None:
    server = state.servers["postgres"]
    programs = postgres.find_programs(Path(state.postgres_bin) if state.postgres_bin else None)
    progress("starting PostgreSQL")
    place = postgres.choose_place(directory, server.home)
    server.home = str(place.home)
    server.ports = free_ports(1, server.ports)
    save()
    deadline = time.monotonic() + timeout_s
    server.process = postgres.launch(place, programs, port=server.ports[0], durable=state.durable)
    save()
    _await(server, lambda process: postgres.wait_ready(process, place, server.ports[0], deadline))


def _start_kafka(
    directory: Path, state: StackState, timeout_s: float, progress: Progress, save: Callable[[], None]
) -> None:
    server = state.servers["kafka"]
    jars = broker_jars(progress=progress)
    runtime = java.find()
    progress("starting Apache Kafka")
    home = Path(server.home) if server.home else directory / "kafka"
    server.home = str(home)
    server.ports = free_ports(2, server.ports)
    save()
    deadline = time.monotonic() + timeout_s
    server.process = kafka.launch(
        home,
        jars,
        runtime,
        port=server.ports[0],
        controller_port=server.ports[1],
        heap_mb=state.kafka_heap_mb,
        durable=state.durable,
    )
    save()
    _await(server, lambda process: kafka.wait_ready(process, home, server.ports[0], deadline))


def _await(server: Server, wait: Callable[[ProcessId], None]) -> None:
    process = server.process
    if process is None:
        raise StackError("the server was not launched")
    try:
        wait(process)
    except StackError as error:
        end(process, [])  # a server that does not answer must not be found running later
        if "Address already in use" in error.message:
            raise _PortTaken(error.message) from error
        raise


def _stop(directory: Path, state: StackState, names: tuple[ServerName, ...], *, kill: bool) -> list[ServerName]:
    halts = {"postgres": postgres.halt, "kafka": kafka.halt}
    running = [(name, each.process) for name in names if (each := state.servers[name]).process and each.alive]
    with ThreadPoolExecutor(max_workers=len(names), thread_name_prefix="stack") as pool:
        for done in [pool.submit(halts[name], process, kill=kill) for name, process in running]:
            done.result()
    for name in names:
        state.servers[name].process = None
    write(directory, state)
    return [name for name, _ in running]
