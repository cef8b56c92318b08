"""The server's side of a control socket: a thread that lets clients in, and one for each of them.

A client cannot hold the harvester up: it talks to a thread of its own, what it sends and gets is bounded, and one that
does not read its answers, or says nothing for minutes, is hung up on; but not whoever has stopped the harvester, who
learns by that of its end. Only processes of the same user, and of root, are
heard; the kernel says whose they are (SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Protocol

from harvester.control.desk import Log
from harvester.control.errors import NotUnderstood
from harvester.control.listening import Listener
from harvester.control.peers import peer_of
from harvester.control.protocol import MAX_REQUEST_BYTES, Answer, Lines, Request, decode_request, encode_answer

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
