"""Log lines: what is in them, and that nothing about writing them can hurt the process."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from harvester.errors import BrokerUnavailable, HarvesterError
from harvester.telemetry.logging import LEVELS, LOGGER, TRACE, configure, logger_for


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_where_nobody_looks() -> None:
    stream = io.StringIO()
    base = configure("Info", name="host_1", stream=stream)
    logger_for(base, "host_1", 3).info("sent %d%%", 5, extra={"topic": "t", "at": "never", "obj": object})
    logger_for(base.getChild("relay"), "host_1").warning("slow")
    base.error("direct")
    base.debug("unseen")
    first, second, third = json_lines(stream)
    assert list(first)[:6] == ["at", "level", "name", "shard", "logger", "message"]
    assert first.pop("at").endswith("Z")
    assert first == {
        "level": "info",
        "name": "host_1",
        "shard": 3,
        "logger": "harvester",
        "message": "sent 5%",
        "topic": "t",
        "obj": "<class 'object'>",
    }
    assert (second["logger"], second["shard"], second["level"]) == ("harvester.relay", None, "warning")
    assert (third["name"], third["message"]) == ("host_1", "direct")


def test_one_line_for_people_on_a_terminal() -> None:
    stream = Terminal()
    logger_for(configure("info", name="n", stream=stream), "host_1", 3).info("sent %s", "x\ny\x1b[31m", extra={"k": 1})
    line = stream.getvalue()
    assert line.endswith(" INFO    host_1[3] sent x\\ny\\x1b[31m k=1\n")
    assert line.count("\n") == 1


def test_the_form_can_be_chosen() -> None:
    stream = Terminal()
    configure("info", json=True, name="n", stream=stream).info("x")
    assert json_lines(stream)[0]["message"] == "x"


def test_levels() -> None:
    stream = io.StringIO()
    for name, number in LEVELS.items():
        assert configure(name.upper(), name="n", stream=stream).level == number
    logger = configure("trace", name="n", stream=stream)
    logger_for(logger, "n").log(TRACE, "detail")
    assert json_lines(stream)[-1]["level"] == "trace"


def test_configuring_again_replaces_the_output() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("info", name="n", stream=first)
    configure("info", name="n", stream=second).info("x")
    assert (first.getvalue(), len(json_lines(second))) == ("", 1)


def failing(logger: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except type(error):
        logger.exception("it failed")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_was_foreseen_comes_without_a_traceback(stream: io.StringIO) -> None:
    failing(configure("info", name="n", stream=stream), BrokerUnavailable("no answer", hint="start it"))
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "Traceback" not in text
    assert "no answer" in text
    assert "start it" in text


def test_a_bug_comes_with_its_traceback_as_one_field() -> None:
    stream = io.StringIO()
    failing(configure("info", name="n", stream=stream), ZeroDivisionError("bug"))
    (line,) = json_lines(stream)
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("ZeroDivisionError: bug")


def test_a_bug_is_readable_on_a_terminal() -> None:
    stream = Terminal()
    failing(configure("info", name="n", stream=stream), ZeroDivisionError("bug"))
    assert stream.getvalue().rstrip().splitlines()[-1].strip() == "ZeroDivisionError: bug"


def test_debug_shows_every_traceback() -> None:
    stream = io.StringIO()
    failing(configure("debug", name="n", stream=stream), HarvesterError("x"))
    assert json_lines(stream)[0]["error"].startswith("Traceback")


def test_a_hosts_own_logger_gets_the_names_in_text_and_record(caplog: pytest.LogCaptureFixture) -> None:
    own = logging.getLogger("my.app")
    with caplog.at_level(logging.INFO, "my.app"):
        logger_for(own, "100%", 2).info("sent %s", "x", extra={"topic": "t"})
        logger_for(own, "h").info("100% plain")
    assert [record.getMessage() for record in caplog.records] == ["[100_[2]] sent x", "[h] 100% plain"]
    first = vars(caplog.records[0])
    assert (first["instance"], first["shard"], first["topic"]) == ("100%", 2, "t")
    assert first["funcName"] == "test_a_hosts_own_logger_gets_the_names_in_text_and_record"


def test_nothing_reaches_the_hosts_root_logger(caplog: pytest.LogCaptureFixture) -> None:
    configure("info", name="n", stream=io.StringIO()).info("x")
    assert caplog.records == []


def test_a_reader_that_goes_away_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as stream:
        logger = configure("info", name="n", stream=stream)
        logger.info("heard")
        assert b"heard" in os.read(read, 1000)
        os.close(read)
        for _ in range(1000):
            logger.info("unheard %s", "x" * 1000)
        # the file object may still hold what could not be written: closing it must not bring the error back
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    assert capfd.readouterr() == ("", "")


def test_a_line_for_which_there_is_no_room_is_lost_and_no_other() -> None:
    class Disk(io.StringIO):
        full = True

        def flush(self) -> None:
            if self.full:
                self.seek(0)
                self.truncate()
                raise OSError(errno.ENOSPC, "No space left on device")

    stream = Disk()
    logger = configure("info", name="n", json=True, stream=stream)
    logger.info("lost")
    stream.full = False
    logger.info("kept")
    assert [line["message"] for line in json_lines(stream)] == ["kept"]


@pytest.mark.parametrize("stream", [None, "closed"])
def test_no_standard_error_is_no_error(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone if stream else None)
    logger = configure("info", name="n")
    logger.info("x")
    logger.info("x")


def test_standard_error_is_looked_up_at_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = configure("info", name="n", json=True)
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logger.info("x")
    assert json_lines(later)[0]["message"] == "x"


def test_a_wrong_log_call_is_reported_not_raised() -> None:
    stream = io.StringIO()
    logger = configure("info", name="n", stream=stream)
    logger.info("%d records", "many")
    logger.info("next")
    first, second = stream.getvalue().splitlines()
    assert "%d records" in first
    assert json.loads(second)["message"] == "next"


def test_what_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    configure("info", json=False, name="n", stream=stream).info("größe \udc80")
    assert b"gr\\xf6\\xdfe" in raw.getvalue()
