"""A directory as a store, and what `ClaimChecks` says of what it finds there."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from harvester import ClaimChecks, ConfigurationError, StoreSettings
from harvester.claim_check.reference import read_url, refer, replaced
from harvester.claim_check.stores import open_store
from harvester.errors import StoredValueChanged, StoredValueMissing, StoreUnavailable
from harvester.record import KafkaRecord
from tests.support.large_values import s3

__all__ = ["s3"]

VALUE = b"x" * 1000
RECORD = KafkaRecord(7, b"key", "orders", VALUE, [("source", b"shop")], -1, 0)
NAME = refer(RECORD).name


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(f"file://{tmp_path}/")


def consumed(settings: StoreSettings, record: KafkaRecord = RECORD) -> Any:
    """The record as a consumer gets it."""
    published = replaced(record, refer(record), settings.url)
    return SimpleNamespace(
        topic=lambda: "orders", offset=lambda: 3, headers=lambda: published.headers, value=lambda: published.value
    )


def test_a_value_is_put_and_got_and_a_repeat_changes_nothing(settings: StoreSettings, tmp_path: Path) -> None:
    store = open_store(settings)
    for _ in range(2):
        store.put(NAME, VALUE)
        assert store.get(NAME) == VALUE
        assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()] == [NAME]


def test_file_and_directories_are_synced_before_and_after_the_name_is_given(
    settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        done.append("file" if path.is_file() else f"directory {path.relative_to(tmp_path)}")
        sync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    open_store(settings).put(NAME, VALUE)
    assert done == ["directory .", "file", "rename", "directory orders"]


def test_a_write_that_fails_leaves_nothing_behind(
    settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "orders").mkdir()
    with monkeypatch.context() as inner:
        inner.setattr(os, "fsync", full)
        with pytest.raises(StoreUnavailable, match="No space left"):
            open_store(settings).put(NAME, VALUE)
    assert list((tmp_path / "orders").iterdir()) == []


def test_a_directory_that_is_not_mounted_is_no_store(settings: StoreSettings, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(StoreUnavailable):
        open_store(settings).put(NAME, VALUE)
    with pytest.raises(StoreUnavailable):
        open_store(settings).get(NAME)
    assert not tmp_path.exists()


def test_a_record_is_resolved_and_its_references_are_left_out(settings: StoreSettings) -> None:
    open_store(settings).put(NAME, VALUE)
    record = ClaimChecks(settings.url).resolve(consumed(settings))
    assert (record.value(), record.headers(), record.topic(), record.offset()) == (
        VALUE, [("source", b"shop")], "orders", 3,
    )  # fmt: skip


def test_a_record_with_its_own_value_is_given_back_as_it_is(settings: StoreSettings) -> None:
    plain = SimpleNamespace(headers=lambda: None, value=lambda: b"own")
    assert ClaimChecks(settings).resolve(plain) is plain
    assert ClaimChecks(settings).value(b"own", None) == b"own"
    assert ClaimChecks(settings).value(None, []) is None


@pytest.mark.parametrize("own", [b"own", b"", None])
def test_a_record_with_the_headers_of_another_has_its_own_value(settings: StoreSettings, own: bytes | None) -> None:
    open_store(settings).put(NAME, VALUE)
    checks, forwarded = ClaimChecks(settings), consumed(settings)
    forwarded.value = lambda: own
    assert not checks.applies_to(forwarded)
    assert checks.resolve(forwarded) is checks.resolve_or_mark(forwarded) is forwarded
    assert checks.value(own, forwarded.headers()) == own


def test_the_store_is_the_consumers_own_wherever_a_record_points(settings: StoreSettings, tmp_path: Path) -> None:
    """The same file system may be mounted elsewhere; and no record may send a consumer to another place."""
    open_store(settings).put(NAME, VALUE)
    elsewhere = consumed(StoreSettings("s3://somebody-elses-bucket"))
    assert ClaimChecks(f"file://{tmp_path}").resolve(elsewhere).value() == VALUE


def test_a_value_that_is_missing_or_changed_is_an_error(settings: StoreSettings, tmp_path: Path) -> None:
    checks = ClaimChecks({"url": settings.url})
    with pytest.raises(StoredValueMissing, match=NAME) as missing:
        checks.resolve(consumed(settings))
    assert missing.value.hint is not None
    open_store(settings).put(NAME, b"y" * 1000)
    with pytest.raises(StoredValueChanged, match=f"file://{tmp_path}/{NAME} .*SHA-256 differs"):
        checks.resolve(consumed(settings))


@pytest.mark.parametrize(
    "url", ["", "/srv/values", "file://host/srv", "file:", "s3://", "s3://B", "ftp://host/x", "s3://bucket/a?b", "s3:x"]
)
def test_what_is_no_store(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not the URL of a store"):
        StoreSettings(url)


def test_a_url_has_one_form() -> None:
    assert read_url("file:///srv/values/") == read_url("file://localhost/srv/values")
    assert read_url("s3://bucket/") == "s3://bucket"
    assert read_url("s3://bucket/a/b/") == "s3://bucket/a/b"


def test_a_store_of_s3_puts_gets_and_misses(s3: StoreSettings) -> None:
    checks = ClaimChecks(s3)
    with pytest.raises(StoredValueMissing, match=f"s3://values/of/tests/{NAME}"):
        checks.resolve(consumed(s3))
    for _ in range(2):
        open_store(s3).put(NAME, VALUE)
    assert checks.resolve(consumed(s3)).value() == VALUE
    assert pickle.loads(pickle.dumps(checks)).resolve(consumed(s3)).value() == VALUE


def test_a_store_of_s3_that_is_away_or_refuses_is_unavailable(s3: StoreSettings) -> None:
    for settings in (replace(s3, url="s3://no-such-bucket"), replace(s3, endpoint="http://127.0.0.1:9")):
        store = open_store(settings)
        with pytest.raises(StoreUnavailable, match=settings.url):
            store.put(NAME, VALUE)
        with pytest.raises(StoreUnavailable, match=settings.url):
            store.get(NAME)


def test_s3_that_does_not_tell_what_is_missing_is_unavailable_and_the_right_is_named(s3: StoreSettings) -> None:
    """As S3 answers for a missing object if the right to list the bucket is missing, too."""

    class Denied(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>not authorized</Message></Error>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = answer  # noqa: N815 - names that the base class looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Denied)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        denying = replace(s3, endpoint=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StoreUnavailable, match=f"s3://values/of/tests/{NAME} may also be missing") as refused:
            ClaimChecks(denying).resolve_or_mark(consumed(denying))
        assert "s3:ListBucket" in (refused.value.hint or "")
        with pytest.raises(StoreUnavailable, match="AccessDenied") as refused:
            open_store(denying).put(NAME, VALUE)
        assert "s3:ListBucket" not in (refused.value.hint or "")
    finally:
        server.shutdown()
        server.server_close()


def test_without_boto3_a_store_of_s3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="boto3 is not installed") as refused:
        ClaimChecks("s3://bucket")
    assert "[s3]" in (refused.value.hint or "")
