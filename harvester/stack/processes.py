"""Starts processes that outlive this one, each in its own session, and recognises them later without error.

A pid alone identifies nothing, since the kernel reuses it. Together with the boot and the process's start time
(`/proc/PID/stat`, field 22, in clock ticks since boot; proc(5)), it identifies one process forever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harvester.errors import StackError

# Children of this very process must be reaped by it, or they would remain as zombies; Popen does that when polled.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies one process forever: pid, start in ticks since boot, and the boot it belongs to."""

    pid: int
    started_ticks: int
    boot: str


@dataclass(frozen=True, slots=True)
class RunAs:
    """The account under which a child runs; requires root."""

    uid: int
    gid: int


def boot_id() -> str:
    """UUID of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def parse_stat(text: str) -> tuple[str, int, int]:
    """From the text of `/proc/PID/stat`: (state letter, parent pid, start in ticks since boot)."""
    # The second field is the program's name in parentheses and may itself contain blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1]), int(fields[19])


def _stat(pid: int) -> tuple[str, int, int] | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def identify(pid: int) -> ProcessId | None:
    """The identity of the process that now has `pid`; None if there is none."""
    found = _stat(pid)
    return ProcessId(pid, found[2], boot_id()) if found else None


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process is still running; a zombie is not.

    A child of ours that is not running has been reaped: PostgreSQL takes the zombie of a former server for a live one.
    """
    found = _stat(process.pid)
    if found is None or found[2] != process.started_ticks or boot_id() != process.boot:
        return False
    child = _children.get(process.pid)
    if child is None:
        return found[0] not in "ZX"
    # Polled after the state was read: the other way round, a child that ends in between would be gone and remain a
    # zombie.
    if child.poll() is None:
        return True
    _children.pop(process.pid, None)
    return False


def children_of(process: ProcessId) -> list[ProcessId]:
    """The direct children that are running now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat and stat[1] == process.pid:
                found.append(ProcessId(int(entry.name), stat[2], process.boot))
    return found


def spawn(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path, run_as: RunAs | None) -> ProcessId:
    """Start `command` in a new session, output appended to `log`; it survives this process and its terminal."""
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                user=run_as.uid if run_as else None,
                group=run_as.gid if run_as else None,
                extra_groups=[] if run_as else None,
            )
        except OSError as error:
            raise StackError(f"cannot start {command[0]}: {error}") from error
    _children[child.pid] = child
    identity = identify(child.pid)
    if identity is None:  # impossible: an unreaped child keeps its entry in /proc
        raise StackError(f"{command[0]} vanished during startup", hint=f"see {log}")
    return identity


def run(
    command: Sequence[str],
    *,
    what: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    run_as: RunAs | None = None,
) -> str:
    """Run a short command to completion and return its output; StackError with its last lines if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=None if env is None else dict(env),
            cwd=cwd,
            user=run_as.uid if run_as else None,
            group=run_as.gid if run_as else None,
            extra_groups=[] if run_as else None,
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{what} did not end within {timeout_s:g} s") from error
    except OSError as error:
        raise StackError(f"{what} could not be started: {error}") from error
    if done.returncode != 0:
        raise StackError(f"{what} failed (exit code {done.returncode}):\n{last_lines(done.stdout)}")
    return done.stdout


def end(process: ProcessId, signals: Sequence[tuple[signal.Signals, float]]) -> None:
    """Send the signals in order, each followed by up to that many seconds of waiting, until the process is gone.

    SIGKILL follows automatically. A process that is already gone, or whose pid now belongs to another, is left alone.
    """
    for number, patience_s in (*signals, (signal.SIGKILL, 10.0)):
        if not send(process, number):
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if not is_alive(process):
                return
            time.sleep(0.02)
    raise StackError(f"process {process.pid} survived SIGKILL")


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone. The pidfd rules out a pid recycled in between."""
    try:
        handle = os.pidfd_open(process.pid)
    except (ProcessLookupError, FileNotFoundError):  # the latter if the number now belongs to a thread
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise StackError(
            f"process {process.pid} belongs to another user", hint="stop the stack as the user who started it"
        ) from error
    else:
        return True
    finally:
        os.close(handle)


def last_lines(text: str, count: int = 15) -> str:
    """The end of a log, indented, for an error message."""
    lines = [line for line in text.splitlines() if line.strip()][-count:]
    return "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"


def tail(log: Path, count: int = 15) -> str:
    """`last_lines` of a file's last 64 KiB; a missing file prints as empty."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            return last_lines(file.read().decode(errors="replace"), count)
    except FileNotFoundError:
        return last_lines("")
