"""Finds running harvesters by their control sockets, sends them requests, and follows their status.

Each followed harvester has its own thread, so that a hanging one holds up no other.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from harvester.control.protocol import (
    MAX_ANSWER_BYTES,
    PREFIX,
    SAME_VERSION,
    ControlError,
    Glimpse,
    NoHarvester,
    NotUnderstood,
    SeveralHarvesters,
    from_json,
    object_of,
)
from harvester.control.sockets import SUFFIX, file_name, is_believed, is_live, looked_through, may_answer, peer_of
from harvester.status import KeyStatus, Status

ANSWERS_S = 10.0
_QUEUES_S = 0.02
_READ_BYTES = 1 << 16
_SAME_USER = "run this as the user that runs the harvester, or as root"


class Connection:
    """A connection to one harvester; a context manager. Not thread-safe."""

    def __init__(self, path: Path, timeout_s: float = ANSWERS_S) -> None:
        """Raises NoHarvester if nobody listens there, or only an untrusted process (`may_answer`)."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        self._http = http.client.HTTPConnection("localhost")
        self._http.sock, self._http.auto_open = self._socket, 0
        self._streamed: http.client.HTTPResponse | None = None
        deadline = time.monotonic() + timeout_s
        try:
            while not self._is_connected():
                if time.monotonic() > deadline:
                    raise self._silent()
                time.sleep(_QUEUES_S)
            self._identify()
        except OSError as error:
            self._socket.close()
            raise self._gone(error) from error
        except NoHarvester:
            self._socket.close()
            raise

    def ask(self, command: str, *, answers_s: float = ANSWERS_S, **arguments: Any) -> Mapping[str, Any]:
        """Return the answer. Raises ControlError if it is a refusal, NoHarvester if there is none."""
        with self._errors():
            return self._checked(*self._send(command, answers_s, arguments))

    def status(self, answers_s: float = ANSWERS_S) -> Status:
        """Its latest snapshot."""
        return from_json(Status, self.ask("status", answers_s=answers_s))

    def key(self, key: str, answers_s: float = ANSWERS_S) -> KeyStatus:
        """Everything that the harvester and its database know about this key."""
        return from_json(KeyStatus, self.ask("key", answers_s=answers_s, key=key))

    def watch(self, every_s: float, answers_s: float = ANSWERS_S) -> Iterator[Status]:
        """Yield a snapshot now and every `every_s`; raises NoHarvester when the harvester ends. The connection's last
        use.

        `answers_s`: the longest silence.
        """
        with self._errors():
            self._streamed, code = self._send("watch", answers_s, {"every_s": every_s})
            if code != HTTPStatus.OK:
                self._checked(self._streamed, code)
            while line := self._streamed.readline(MAX_ANSWER_BYTES):
                yield from_json(Status, object_of(line))
            raise self._ended()

    def wait_ended(self, within_s: float) -> bool:
        """Wait until the harvester has ended, as shown by the closed connection; False if the time is up."""
        deadline = time.monotonic() + within_s
        try:
            while True:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                if not self._socket.recv(_READ_BYTES):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection."""
        if self._streamed is not None:
            self._streamed.close()
        self._http.close()
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _send(
        self, command: str, answers_s: float, arguments: Mapping[str, Any]
    ) -> tuple[http.client.HTTPResponse, int]:
        self._socket.settimeout(answers_s)
        # A harvester that turns a client away closes the connection before reading the request, but answers it.
        with contextlib.suppress(ConnectionError):
            self._http.request("POST", PREFIX + command, json.dumps(arguments).encode())
        response = self._http.getresponse()
        return response, response.status

    def _checked(self, response: http.client.HTTPResponse, code: int) -> Mapping[str, Any]:
        if code == HTTPStatus.NOT_FOUND:
            raise NotUnderstood(f"the harvester on {self.path} has a different version", hint=SAME_VERSION)
        values = object_of(response.read(MAX_ANSWER_BYTES))
        if code == HTTPStatus.OK:
            return values
        hint = values.get("hint")
        raise ControlError(str(values.get("error")), hint=None if hint is None else str(hint))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of sockets and HTTP into ours."""
        try:
            yield
        except TimeoutError as error:
            raise self._silent() from error
        except (http.client.RemoteDisconnected, http.client.NotConnected, http.client.IncompleteRead) as error:
            raise self._ended() from error
        except OSError as error:
            raise self._gone(error) from error
        except http.client.HTTPException as error:
            raise NotUnderstood(f"the answer of the harvester on {self.path} is not HTTP: {error!r}") from error

    def _is_connected(self) -> bool:
        """Try once; False if too many others wait to be accepted."""
        try:
            self._socket.connect(str(self.path))
        except BlockingIOError:
            return False
        return True

    def _identify(self) -> None:
        pid, uid = peer_of(self._socket)
        if not may_answer(uid, os.geteuid(), self.path.parent.stat().st_uid):
            raise NoHarvester(
                f"the process that listens on {self.path} is not trusted: it runs as uid {uid} (pid {pid})",
                hint=f"only a harvester run by root or by uid {os.geteuid()} may answer; {_SAME_USER}"
                if os.geteuid()
                else "only a harvester run by root or by the owner of that directory may answer",
            )

    def _ended(self) -> NoHarvester:
        return NoHarvester(f"the harvester on {self.path} has ended", hint="see its log")

    def _silent(self) -> NoHarvester:
        return NoHarvester(
            f"the harvester on {self.path} does not answer", hint="its process may be stopped, or the machine busy"
        )

    def _gone(self, error: OSError) -> NoHarvester:
        hint = (
            _SAME_USER
            if isinstance(error, PermissionError)
            else "check that it is running: `harvester watch` finds running ones"
        )
        return NoHarvester(f"no harvester listens on {self.path} ({error.strerror or error})", hint=hint)


def running(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The sockets of all harvesters that this user can find, ordered by name."""
    found: dict[Path, Path] = {}
    for folder in filter(_is_believed, _folders(environ)):
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                if not path.is_symlink() and is_live(path):  # a link could lead to another user's
                    found.setdefault(path.resolve(), path)
            except OSError:  # belongs to another user
                continue
    return sorted(found.values(), key=lambda path: path.name)


def find(name: str | None, path: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The right socket: the given one, that of the harvester with this name, or that of the only one.

    Raises NoHarvester and SeveralHarvesters.
    """
    if path is not None:
        return path
    found = running(environ)
    if name is not None:
        meant = [path for path in found if path.name == file_name(name)]
        if len(meant) == 1:
            return meant[0]
        if not meant:
            raise NoHarvester(f"no harvester named {name!r} runs here; {_those_that_run(found)}", hint=_SAME_USER)
        found = meant
    if not found:
        raise NoHarvester(
            f"no harvester runs here ({_places(environ)})",
            hint=f"{_SAME_USER}; use --socket for one that listens elsewhere (control.socket)",
        )
    if len(found) > 1:
        raise SeveralHarvesters(_those_that_run(found), hint="choose one with --name or --socket")
    return found[0]


def _those_that_run(found: Sequence[Path]) -> str:
    if not found:
        return "none is running"
    return "running: " + ", ".join(str(path) for path in found)


def _folders(environ: Mapping[str, str]) -> list[Path]:
    return looked_through(environ, os.geteuid(), tempfile.gettempdir())


def _places(environ: Mapping[str, str]) -> str:
    folders = _folders(environ)
    others = [folder for folder in folders if _is_believed(folder) is False]
    looked = "looked in " + ", ".join(str(folder) for folder in folders if folder not in others)
    if not others:
        return looked
    return f"{looked}; not in {', '.join(map(str, others))}, which other users created or can write to"


def _is_believed(folder: Path) -> bool | None:
    """None if there is no such directory."""
    try:
        return is_believed(folder, os.geteuid())
    except OSError:
        return None


_ANSWERS_S = 3.0
_AGAIN_S = 0.5  # after a failure
_LOOK_S = 2.0  # how often to look for other harvesters
_FORGOTTEN_AFTER_S = 30.0


class StatusFeed(threading.Thread):
    """Follows one harvester; reconnects after failures."""

    def __init__(self, path: Path, every_s: float, news: Callable[[], None]) -> None:
        super().__init__(name=f"feed {path.name}", daemon=True)
        self._every_s, self._news = every_s, news
        self._stopped = threading.Event()
        self.latest = Glimpse(path)

    def run(self) -> None:
        path = self.latest.path
        while not self._stopped.is_set():
            try:
                with Connection(path, _ANSWERS_S) as connection:
                    for status in connection.watch(self._every_s, _ANSWERS_S):
                        self.latest = Glimpse(path, status, None, time.monotonic())
                        self._news()
                        if self._stopped.is_set():
                            return
            except ControlError as error:
                before = self.latest
                since = time.monotonic() if before.trouble is None else before.at
                self.latest = Glimpse(path, before.status, error.message, since)
            self._news()
            self._stopped.wait(_AGAIN_S)

    def stop(self) -> None:
        """End it, without waiting."""
        self._stopped.set()


class Feeds:
    """Follows all harvesters returned by `find`, and looks for new ones periodically. For one thread."""

    def __init__(self, find: Callable[[], Sequence[Path]], every_s: float, news: Callable[[], None]) -> None:
        """`news` is called from any thread when there is something new."""
        self._find, self._every_s, self._news = find, every_s, news
        self._feeds: dict[Path, StatusFeed] = {}
        self._looked_at = -_LOOK_S

    def latest(self) -> list[Glimpse]:
        """A glimpse of each harvester, ordered by path."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            for path in self._find():
                if path not in self._feeds:
                    self._feeds[path] = StatusFeed(path, self._every_s, self._news)
                    self._feeds[path].start()
        self._forget(now)
        return [self._feeds[path].latest for path in sorted(self._feeds)]

    def stop(self) -> None:
        """End all of them."""
        for feed in self._feeds.values():
            feed.stop()

    def _forget(self, now: float) -> None:
        """Forget harvesters that have been gone for a while, as long as another one exists."""
        known = [feed.latest for feed in self._feeds.values()]
        gone = [glimpse for glimpse in known if glimpse.trouble is not None and now - glimpse.at > _FORGOTTEN_AFTER_S]
        if len(gone) < len(known):
            for glimpse in gone:
                if not glimpse.path.exists():
                    self._feeds.pop(glimpse.path).stop()
