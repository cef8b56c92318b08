"""The server side of a control socket: a thread that accepts clients, one for each of them, and what requests do.

A client cannot hold the harvester up: it talks to a thread of its own, what it sends and gets is bounded, and one
that does not read its answers, or says nothing for minutes, is hung up on; but not whoever has stopped the harvester,
who learns by that of its end. Only processes of the same user, and of root, are heard; the kernel says whose they are
(SO_PEERCRED).

What a request does to a harvester.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from harvester.control.protocol import (
    MAX_REQUEST_BYTES,
    Answer,
    Lines,
    NotUnderstood,
    Request,
    decode_request,
    encode_answer,
    key_to_json,
    to_json,
)
from harvester.control.sockets import Listener, peer_of
from harvester.errors import HarvesterError
from harvester.status import KeyStatus, Status

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

LONGEST_SCALE_S = 60.0
_QUESTIONS = ("status", "key")
_FREE = (*_QUESTIONS, "stop")  # these wait for nobody


class Controlled(Protocol):
    """What is controlled: `harvester.Harvester`."""

    def status(self) -> Status: ...

    def key(self, key: str) -> KeyStatus: ...

    def pause(self) -> bool: ...

    def resume(self) -> bool: ...

    def remark(self) -> None: ...

    def scale(self, shards: int, within_s: float) -> bool: ...

    def set_log_level(self, level: str) -> None: ...

    def stop_soon(self) -> None: ...


class Desk:
    """Commands that change something are performed one after the other, whoever asks."""

    def __init__(self, harvester: Controlled, log: Log) -> None:
        self._harvester, self._log = harvester, log
        self._busy = threading.Lock()

    def obey(self, request: Request, who: str) -> Answer:
        """The answer, a refusal included; `who` asks is for the log."""
        free = request.command in _FREE
        if request.command not in _QUESTIONS:
            arguments = "".join(f" {value}" for value in request.arguments.values())
            self._log.info("control: %s%s (%s)", request.command, arguments, who)
        if not free and not self._busy.acquire(blocking=False):
            return Answer(error="another command is under way", hint="try again when it is done")
        try:
            return Answer(self._perform(request))
        except HarvesterError as error:
            return Answer(error=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and the harvester goes on
            self._log.exception("control: %s failed", request.command)
            return Answer(error=f"internal error: {error!r}", hint="the harvester's log has more; please report this")
        finally:
            if not free:
                self._busy.release()

    def _perform(self, request: Request) -> Mapping[str, Any]:
        harvester, arguments = self._harvester, request.arguments
        match request.command:
            case "status":
                return to_json(harvester.status())
            case "key":
                return key_to_json(harvester.key(arguments["key"]))
            case "pause":
                return self._told(changed=harvester.pause())
            case "resume":
                return self._told(changed=harvester.resume())
            case "remark":
                harvester.remark()
                return self._told()
            case "scale":
                return self._scaled(arguments["shards"], min(arguments["within_s"], LONGEST_SCALE_S))
            case "loglevel":
                harvester.set_log_level(arguments["level"])
                return self._told()
            case _:
                harvester.stop_soon()
                return self._told()

    def _scaled(self, shards: int, within_s: float) -> Mapping[str, Any]:
        before = len(self._harvester.status().shards)
        if before != shards and not self._harvester.scale(shards, within_s):
            raise HarvesterError(
                f"still {before} shards: not everything under way was settled within {within_s:g} s",
                hint="see what is retried or held up (`harvester watch`), then try again",
            )
        return {**self._told(changed=before != shards), "before": before, "shards": shards}

    def _told(self, *, changed: bool = True) -> dict[str, Any]:
        """What a client says about it to a person."""
        status = self._harvester.status()
        return {
            "changed": changed,
            "name": status.name,
            "state": status.state.value,
            "in_flight": status.in_flight,
            "shards": len(status.shards),
        }


MAX_CLIENTS = 32
IDLE_S = 300.0  # a client that says nothing for so long is hung up on
TAKES_S = 5.0  # and so is one that does not take its answer within this time
_READ_BYTES = 1 << 14
_ENDS_WITHIN_S = 1.0
_LATER = "try again later"


class Obeys(Protocol):
    """Who does what is asked; called from several threads."""

    def obey(self, request: Request, who: str) -> Answer:
        """The answer, a refusal included; raises nothing."""


def may_control(peer_uid: int, own_uid: int) -> bool:
    """Whether a process of this user may ask anything."""
    return peer_uid in (own_uid, 0)


class ControlServer(threading.Thread):
    """See the module's text."""

    def __init__(self, listener: Listener, desk: Obeys, log: Log, own_uid: int | None = None) -> None:
        super().__init__(name="harvester-control", daemon=True)
        import os

        self.path = listener.path
        self._listener, self._desk, self._log = listener, desk, log
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        """The thread."""
        while not self._over.is_set():
            try:
                client, _ = self._listener.socket.accept()
            except OSError as error:
                if not self._over.wait(0.1):  # out of descriptors, say
                    self._log.warning("control: no client can be let in: %s", error)
                continue
            self._let_in(client)

    def stop(self) -> None:
        """Remove the socket, hang up on everybody, end the threads."""
        self._over.set()
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _ENDS_WITHIN_S
        for thread in [self, *clients.values()]:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _let_in(self, client: socket.socket) -> None:
        client.settimeout(TAKES_S)
        pid, uid = peer_of(client)
        refusal = None
        if not may_control(uid, self._own_uid):
            self._log.warning("control: uid %d (pid %d) was turned away", uid, pid)
            refusal = Answer(
                error=f"uid {uid} may not control this harvester",
                hint=f"run the command as uid {self._own_uid} or as root",
            )
        with self._lock:
            if refusal is None and len(self._clients) >= MAX_CLIENTS:
                refusal = Answer(error=f"{MAX_CLIENTS} clients are connected already", hint=_LATER)
            if refusal is None:
                thread = threading.Thread(
                    target=self._serve, args=(client, f"uid {uid}, pid {pid}"), name="harvester-client", daemon=True
                )
                self._clients[client] = thread
                try:
                    thread.start()
                    return
                except RuntimeError as error:  # out of threads or memory: this one is sent away, the next may get in
                    del self._clients[client]
                    self._log.warning("control: no client can be let in: %s", error)
                    refusal = Answer(error=f"the harvester has no thread for one more client: {error}", hint=_LATER)
        client.setblocking(False)
        with client, contextlib.suppress(OSError):
            client.send(encode_answer(refusal))

    def _serve(self, client: socket.socket, who: str) -> None:
        lines = Lines(MAX_REQUEST_BYTES)
        idle_s: float | None = IDLE_S
        try:
            while not self._over.is_set():
                client.settimeout(idle_s)
                data = client.recv(_READ_BYTES)
                if not data:
                    return
                for line in lines.feed(data):
                    if self._answer(client, line, who):
                        idle_s = None  # it may wait for our end, however long that takes, and see it by our hanging up
        except NotUnderstood as error:
            with contextlib.suppress(OSError):
                client.sendall(encode_answer(Answer(error=error.message, hint=error.hint)))
        except OSError:
            pass  # it has gone, or was too slow
        finally:
            with self._lock:
                self._clients.pop(client, None)
            client.close()

    def _answer(self, client: socket.socket, line: bytes, who: str) -> bool:
        """Whether the harvester stops now."""
        request = decode_request(line)
        answer = self._desk.obey(request, who)
        client.settimeout(TAKES_S)
        client.sendall(encode_answer(answer))
        return request.command == "stop" and answer.error is None
