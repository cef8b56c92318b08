"""A schema registry over HTTP, in this process: as much of one as serialisers and the lake ask of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Registry:
    """Takes schemas, and gives them by id and by subject. `asked`: the paths of all GET requests."""

    def __init__(self) -> None:
        self.url = ""
        self.is_up = True
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[str, int] = {}
        self.asked: list[str] = []

    def register(self, subject: str, schema: dict[str, Any], number: int | None = None) -> int:
        number = number or len(self.schemas) + 1
        self.schemas[number], self.subjects[subject] = schema, number
        return number

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """The status and the answer to a request; `body` None: GET."""
        if not self.is_up:
            return 500, {"error_code": 50001, "message": "no store"}
        parts = path.partition("?")[0].strip("/").split("/")
        match parts:
            case ["subjects", subject, "versions"] if body is not None:
                return 200, {"id": self.register(subject, body)}
            case ["subjects", subject] if body is not None and subject in self.subjects:
                return 200, {"subject": subject, "id": self.subjects[subject], "version": 1, **body}
            case ["schemas", "ids", number] if int(number) in self.schemas:
                return 200, self.schemas[int(number)]
            case ["schemas", "ids", number] if int(number) < 2**31:  # what is no int is no id to Confluent's
                return 404, {"error_code": 40403, "message": "Schema not found"}
            case ["subjects", subject, "versions", "latest"] if subject in self.subjects:
                latest = self.subjects[subject]
                return 200, {"subject": subject, "id": latest, "version": 1, **self.schemas[latest]}
            case ["subjects", subject, "versions", version] if version == "1" and subject in self.subjects:
                first = self.subjects[subject]
                return 200, {"subject": subject, "id": first, "version": 1, **self.schemas[first]}
            case ["subjects", *_]:
                return 404, {"error_code": 40401, "message": "Subject not found"}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}


@contextmanager
def serving() -> Iterator[Registry]:
    """A registry that answers at `url`."""
    registry = Registry()

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        if request.command == "POST":
            return registry.answer(request.path, json.loads(body))
        registry.asked.append(request.path)
        return registry.answer(request.path, None)

    with answering(answer) as registry.url:
        yield registry


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler, bytes], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a server that answers each request, given with its body, with this status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, found = answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 - the name that the server looks for

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
