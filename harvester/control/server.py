"""Serves a harvester's control socket: access control, and the effect of each request.

Only processes of the same user and of root have access, as identified by the kernel (SO_PEERCRED). A client that does
not read its answers, or is idle for minutes, is disconnected. The client that stopped the harvester is not: it takes
the end of its connection to mean that the harvester has ended.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harvester.config import Config
from harvester.control.protocol import COMMANDS, PREFIX, NotUnderstood, arguments_of
from harvester.control.sockets import Listener, choices, file_name, listen, listen_in_first, peer_of
from harvester.errors import HarvesterError
from harvester.http.server import HttpServer, Request, Response, Route, Router, json_line
from harvester.status import KeyStatus, Status, to_json

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

LONGEST_SCALE_S = 60.0
_SHORTEST_WATCH_S = 0.05
_QUESTIONS = ("status", "key")
_FREE = (*_QUESTIONS, "stop")  # these do not wait for others


class Controlled(Protocol):
    """The controlled harvester: `harvester.Harvester`."""

    def status(self) -> Status: ...

    def key(self, key: str) -> KeyStatus: ...

    def pause(self) -> bool: ...

    def resume(self) -> bool: ...

    def remark(self) -> None: ...

    def scale(self, shards: int, within_s: float) -> bool: ...

    def set_log_level(self, level: str) -> None: ...

    def stop_soon(self) -> None: ...


def may_control(peer_uid: int, own_uid: int) -> bool:
    """Whether a process of this user has access."""
    return peer_uid in (own_uid, 0)


class ControlServer(HttpServer):
    """Executes commands; those that change something one at a time, for all clients."""

    most_clients = 32
    idle_s = 300.0
    takes_s = 5.0
    longest_s = None
    protocol = "HTTP/1.1"  # several requests per connection

    def __init__(self, listener: Listener, harvester: Controlled, log: Log, own_uid: int | None = None) -> None:
        super().__init__("harvester-control", Router(self._routes()))
        self.path = listener.path
        self._listener, self._harvester, self._log = listener, harvester, log
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._busy = threading.Lock()

    @classmethod
    def of(cls, config: Config, harvester: Controlled, log: Log) -> ControlServer | None:
        """The configured server, listening but not started; None if it is switched off.

        Raises ControlError if there is no place for the socket, or a live harvester with that name uses it.
        """
        where, uid = config.control.socket, os.geteuid()
        if where == "off":
            return None
        if where == "auto":
            folders = choices(os.environ, uid, tempfile.gettempdir())
            return cls(listen_in_first(folders, file_name(config.name), uid), harvester, log)
        return cls(listen(Path(where), uid), harvester, log)

    def run(self) -> None:
        self.serve(self._listener.socket)

    def stop(self) -> None:
        """Remove the socket, disconnect all clients, end the threads."""
        self.ended.set()
        self._listener.close()
        super().stop()

    def admit(self, client: socket.socket) -> tuple[str, Response | None]:
        pid, uid = peer_of(client)
        if may_control(uid, self._own_uid):
            return f"uid {uid}, pid {pid}", None
        self._log.warning("control: uid %d (pid %d) was turned away", uid, pid)
        hint = f"run the command as uid {self._own_uid} or as root"
        return "", Response.problem(403, f"uid {uid} may not control this harvester", hint)

    def cannot_accept(self, error: Exception) -> None:
        self._log.warning("control: a client could not be accepted: %s", error)

    def _routes(self) -> Mapping[tuple[str, str], Route]:
        routes: dict[tuple[str, str], Route] = {
            ("POST", PREFIX + command): partial(self._obey, command) for command in COMMANDS
        }
        routes["GET", f"{PREFIX}status"] = partial(self._obey, "status")
        return routes

    def _obey(self, command: str, request: Request) -> Response:
        try:
            arguments = arguments_of(command, request.body)
        except NotUnderstood as error:
            return Response.problem(400, error.message, error.hint)
        if command == "watch":
            return Response(200, "application/x-ndjson", self._snapshots(max(arguments["every_s"], _SHORTEST_WATCH_S)))
        free = command in _FREE
        if command not in _QUESTIONS:
            given = "".join(f" {value}" for value in arguments.values())
            self._log.info("control: %s%s (%s)", command, given, request.peer)
        if not free and not self._busy.acquire(blocking=False):
            return Response.problem(409, "another command is under way", "try again when it is done")
        try:
            return Response.json(200, self._perform(command, arguments), may_idle=command == "stop")
        except HarvesterError as error:
            return Response.problem(409, error.message, error.hint)
        except Exception as error:  # noqa: BLE001 - reported to the client, and the harvester continues
            self._log.exception("control: %s failed", command)
            hint = "the harvester's log has more; please report this"
            return Response.problem(500, f"internal error: {error!r}", hint)
        finally:
            if not free:
                self._busy.release()

    def _snapshots(self, every_s: float) -> Iterator[bytes]:
        while not self.ended.is_set():
            yield json_line(to_json(self._harvester.status()))
            self.ended.wait(every_s)

    def _perform(self, command: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        harvester = self._harvester
        match command:
            case "status":
                return to_json(harvester.status())
            case "key":
                return to_json(harvester.key(arguments["key"]))
            case "pause":
                return self._outcome(changed=harvester.pause())
            case "resume":
                return self._outcome(changed=harvester.resume())
            case "scale":
                return self._scale(arguments["shards"], min(arguments["within_s"], LONGEST_SCALE_S))
            case "remark":
                harvester.remark()
            case "loglevel":
                harvester.set_log_level(arguments["level"])
            case _:
                harvester.stop_soon()
        return self._outcome(changed=True)

    def _scale(self, shards: int, within_s: float) -> Mapping[str, Any]:
        before = len(self._harvester.status().shards)
        if before != shards and not self._harvester.scale(shards, within_s):
            raise HarvesterError(
                f"still {before} shards: not everything under way was settled within {within_s:g} s",
                hint="check what is being retried or held (`harvester watch`), then try again",
            )
        return {**self._outcome(changed=before != shards), "before": before, "shards": shards}

    def _outcome(self, *, changed: bool) -> dict[str, Any]:
        """The result that a command reports to its user."""
        status = self._harvester.status()
        return {
            "changed": changed,
            "name": status.name,
            "state": status.state.value,
            "in_flight": status.in_flight,
            "shards": len(status.shards),
        }
