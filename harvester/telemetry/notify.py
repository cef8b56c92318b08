"""Notifies the service manager of the process's state, using the protocol of sd_notify(3).

Datagrams of `NAME=value` lines to the Unix socket named by NOTIFY_SOCKET, a path or an abstract name that begins with
`@`. If the variable is not set, every call does nothing. No call ever raises: a relay must not fail because its manager
does not listen.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

_SEND_TIMEOUT_S = 1.0  # a manager that does not read must not delay the relay


class Notifier:
    """Every method returns whether a datagram was sent."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address or None
        self._was_ready = False
        self.watchdog_s = watchdog_s  # the manager ends the process after this time without `watchdog`

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Notifier:
        """From NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID of `environ` (default: the process's own)."""
        environ = os.environ if environ is None else environ
        return cls(environ.get("NOTIFY_SOCKET"), watchdog_s=_watchdog_s(environ))

    def ready(self, status: str | None = None) -> bool:
        """Start-up is complete. Declares this process the main one, in case a wrapper started it."""
        self._was_ready = True
        lines = ["READY=1", f"MAINPID={os.getpid()}"]
        if status is not None:
            lines.append(f"STATUS={_one_line(status)}")
        return self._send(lines)

    def extend_start(self, by_s: float, status: str) -> bool:
        """Start-up continues: the manager's time limit for it will not be reached before `by_s` from now."""
        return self._send([f"EXTEND_TIMEOUT_USEC={round(by_s * 1e6)}", f"STATUS={_one_line(status)}"])

    def status(self, text: str) -> bool:
        """One line for `systemctl status`; line breaks become spaces."""
        return self._send([f"STATUS={_one_line(text)}"])

    def reloaded(self, status: str) -> bool:
        """The end of `reloading`. Does not end a start-up that is still in progress."""
        return self.ready(status) if self._was_ready else self.status(status)

    def reloading(self) -> bool:
        """The configuration is being reread; `reloaded` marks the end (sd_notify(3), Type=notify-reload)."""
        return self._send(["RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"])

    def stopping(self, status: str | None = None) -> bool:
        """The graceful stop has begun."""
        return self._send(["STOPPING=1", *([f"STATUS={_one_line(status)}"] if status is not None else [])])

    def watchdog(self) -> bool:
        """Alive; due at least twice per `watchdog_s` if set."""
        return self._send(["WATCHDOG=1"])

    def widen_watchdog(self, least_s: float) -> bool:
        """Ask for at least this much time between two `watchdog` calls; true if it was less."""
        if self.watchdog_s is None or self.watchdog_s >= least_s:
            return False
        self.watchdog_s = least_s
        return self._send([f"WATCHDOG_USEC={round(least_s * 1e6)}"])

    def _send(self, lines: list[str]) -> bool:
        if self._address is None:
            return False
        message = "\n".join(lines).encode("utf-8", errors="replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto(message, self._address)
        except (OSError, ValueError):  # no such socket, no reader, no usable address
            return False
        return True


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """The manager's watchdog interval, if meant for this process."""
    try:
        if int(environ.get("WATCHDOG_PID", os.getpid())) != os.getpid():
            return None
        interval_us = int(environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return None
    return interval_us / 1e6 if interval_us > 0 else None
