"""Jars by coordinates and digests, from a repository on loopback that fails as repositories do."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harvester.errors import StackError
from harvester.stack import java
from harvester.stack.java import Artifact, fetch_jars, parse_lock

CONTENT = b"a jar" * 100_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
Answer = Callable[[BaseHTTPRequestHandler], None]


def artifact(name: str, digest: str = DIGEST) -> Artifact:
    return Artifact("org.example.deep", name, "1.0", digest)


def whole(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(CONTENT)))
    request.end_headers()
    request.wfile.write(CONTENT)


def half(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(CONTENT)))
    request.end_headers()
    request.wfile.write(CONTENT[: len(CONTENT) // 2])


def refused(code: int) -> Answer:
    return lambda request: request.send_error(code)


@contextmanager
def repository(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> Iterator[list[str]]:
    """The paths that are asked for; answers in order, the last one for all further requests."""
    asked: list[str] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                asked.append(self.path)
                answer = answers[min(len(asked), len(answers)) - 1]
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv(java.REPOSITORY, f"http://127.0.0.1:{server.server_port}/maven2/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(into: Path, *artifacts: Artifact) -> list[float]:
    """The pauses that were made."""
    pauses: list[float] = []
    fetch_jars(artifacts, into, what="the test's jars", hint="a hint", pause=pauses.append)
    return pauses


def test_jars_are_fetched_by_their_coordinates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [artifact(f"lib{number}") for number in range(20)]
    with repository(monkeypatch, whole) as asked:
        assert fetched(tmp_path, *wanted) == []
    assert sorted(asked) == sorted(f"/maven2/org/example/deep/{one.name}/1.0/{one.name}-1.0.jar" for one in wanted)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {one.file: CONTENT for one in wanted}


@pytest.mark.parametrize("fault", [half, refused(503), refused(429)])
def test_a_request_that_fails_is_repeated(fault: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with repository(monkeypatch, fault, fault, whole) as asked:
        assert fetched(tmp_path, artifact("lib")) == [1.0, 2.0]
    assert len(asked) == 3
    assert (tmp_path / "lib-1.0.jar").read_bytes() == CONTENT


@pytest.mark.parametrize(("fault", "words", "requests"), [(half, "broke after", 4), (refused(404), "404", 1)])
def test_a_jar_that_cannot_be_had_is_named(
    fault: Answer, words: str, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with repository(monkeypatch, fault) as asked, pytest.raises(StackError, match=words) as caught:
        fetched(tmp_path, artifact("lib"))
    assert "lib-1.0.jar" in caught.value.message
    assert caught.value.hint == "a hint"
    assert len(asked) == requests


def test_another_file_than_the_expected_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with repository(monkeypatch, whole), pytest.raises(StackError, match="is not the expected file") as caught:
        fetched(tmp_path, artifact("good"), artifact("bad", "0" * 64))
    assert "bad-1.0.jar" in caught.value.message


def test_a_set_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = f"# a comment\n{DIGEST}  org.example:one:1\n{DIGEST}  org.example:two:2\n"
    cache = tmp_path / "harvester"
    with repository(monkeypatch, whole, refused(404)), pytest.raises(StackError, match="404") as caught:
        java.locked_jars("set", lock, what="a set")
    assert java.REPOSITORY in (caught.value.hint or "")
    assert [each.name for each in cache.iterdir()] == [".lock"]
    with repository(monkeypatch, whole) as asked:
        for _ in range(2):
            home = java.locked_jars("set", lock, what="a set")
            assert sorted(file.name for file in home.iterdir()) == ["one-1.jar", "two-2.jar"]
    assert len(asked) == 2
    assert [each.name for each in sorted(cache.iterdir())] == [".lock", "set"]


@pytest.mark.parametrize(
    "line",
    ["abc  org.example:one:1", f"{'g' * 64}  org.example:one:1", f"{DIGEST}  org.example:one", DIGEST],
)
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_lock(line)


def test_two_jars_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        parse_lock(f"{DIGEST}  org.one:lib:1\n{DIGEST}  org.two:lib:1\n")
