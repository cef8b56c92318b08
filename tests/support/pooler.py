"""A pooler in transaction mode, as small as it can be: all clients share one session of the server.

What PgBouncer does with `pool_mode = transaction` and a pool of one, as far as clients can tell: each gets a pid that
no backend has, and the session for as long as its transaction lasts. No COPY, no authentication of clients.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
from psycopg.conninfo import make_conninfo

_SSL, _GSS = 80877103, 80877104
_PARAMETERS = ("server_version", "server_encoding", "client_encoding", "standard_conforming_strings", "TimeZone",
               "integer_datetimes", "DateStyle", "in_hot_standby", "default_transaction_read_only")  # fmt: skip


@contextmanager
def transaction_pooler(dsn: str) -> Iterator[str]:
    """The DSN of a pooler before the server of `dsn`."""
    with (
        closing(psycopg.connect(dsn, sslmode="disable", autocommit=True)) as session,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        pooler = _Pooler(session, listener)
        threading.Thread(target=pooler.accept, daemon=True).start()
        port = listener.getsockname()[1]
        try:
            yield make_conninfo(dsn, host="127.0.0.1", hostaddr="", port=port, sslmode="disable", gssencmode="disable")
        finally:
            listener.shutdown(socket.SHUT_RDWR)


class _Pooler:
    def __init__(self, session: psycopg.Connection[tuple[object, ...]], listener: socket.socket) -> None:
        self._listener = listener
        self._server = socket.socket(fileno=os.dup(session.pgconn.socket))
        self._server.setblocking(True)
        told = {name: session.info.parameter_status(name) for name in _PARAMETERS}
        self._greeting = b"R" + struct.pack("!II", 8, 0)
        for name, value in told.items():
            if value is not None:
                self._greeting += _message(b"S", name.encode() + b"\0" + value.encode() + b"\0")
        self._lent = threading.Lock()
        self._clients = 0

    def accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients += 1
            threading.Thread(target=self._serve, args=(client, self._clients), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        with client:
            try:
                self._greet(client, number)
                while self._transaction(client):
                    pass
            except (OSError, EOFError):
                pass

    def _greet(self, client: socket.socket, number: int) -> None:
        while True:
            length, code = struct.unpack("!II", _exactly(client, 8))
            _exactly(client, length - 8)
            if code not in (_SSL, _GSS):
                break
            client.sendall(b"N")
        key = _message(b"K", struct.pack("!II", 1_000_000_000 + number, 0))
        client.sendall(self._greeting + key + _message(b"Z", b"I"))

    def _transaction(self, client: socket.socket) -> bool:
        """Serve one; False when the client has gone."""
        first = _read(client)
        if first[:1] == b"X":
            return False
        with self._lent:
            message, status = first, b""
            while True:
                self._server.sendall(message)
                if message[:1] in (b"Q", b"S"):
                    status = self._answer(client)
                if status == b"I":
                    return True
                message = _read(client)

    def _answer(self, client: socket.socket) -> bytes:
        """Hand on until the server is ready; returns whether it is in a transaction."""
        while True:
            message = _read(self._server)
            client.sendall(message)
            if message[:1] == b"Z":
                return message[5:6]


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def _read(source: socket.socket) -> bytes:
    head = _exactly(source, 5)
    return head + _exactly(source, struct.unpack("!I", head[1:])[0] - 4)


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
