"""Whom clients of control sockets believe: any user of the machine can make a directory and listen in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harvester.control.client import Connection, find, running
from harvester.control.protocol import NoHarvester
from harvester.control.sockets import is_believed, may_answer
from tests.support.control import at, serving

pytest_plugins = ["tests.support.sockets"]

UID = os.geteuid()
SOMEBODY = 65534
as_root = pytest.mark.skipif(UID != 0, reason="only root can be somebody else")

_LISTENS = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()
print('listens', flush=True)
sys.stdin.read()
"""


@contextmanager
def somebody_listens(path: Path) -> Iterator[None]:
    command = [sys.executable, "-c", _LISTENS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            yield
        finally:
            process.kill()


def test_who_may_answer() -> None:
    assert may_answer(1000, 1000, 1001)
    assert may_answer(0, 1000, 1001)
    assert not may_answer(1001, 1000, 1001)
    assert may_answer(1001, 0, 1001)
    assert may_answer(0, 0, 1001)
    assert not may_answer(1002, 0, 1001)


def test_a_directory_that_others_can_write_to_is_not_looked_into(sockets: Path) -> None:
    with serving(sockets / "x.sock"):
        assert running(at(sockets)) == [sockets / "x.sock"]
        for mode in (0o1777, 0o720):
            sockets.chmod(mode)
            assert running(at(sockets)) == []
            with pytest.raises(NoHarvester, match=f"not in {sockets}, which other users created or can write to"):
                find(None, None, at(sockets))


def test_a_link_is_no_socket(sockets: Path) -> None:
    with serving(sockets / "x.sock"):
        (sockets / "a.sock").symlink_to(sockets / "x.sock")
        assert find("x", None, at(sockets)) == sockets / "x.sock"
        with pytest.raises(NoHarvester, match="no harvester named 'a'"):
            find("a", None, at(sockets))


@as_root
def test_what_somebody_made_where_anybody_can_is_not_roots(sockets: Path) -> None:
    """As /tmp/harvester-0, made before root's own."""
    made = sockets / "harvester-0"
    with serving(made / "x.sock"):
        os.chown(made, SOMEBODY, SOMEBODY)
        assert running(at(made)) == [made / "x.sock"]  # only root can have put it there: that of a service
        sockets.chmod(0o1777)
        assert running(at(made)) == []


@as_root
def test_a_link_is_followed_where_root_or_this_user_made_it(sockets: Path) -> None:
    (sockets / "real").mkdir(mode=0o700)
    link = sockets / "link"
    link.symlink_to(sockets / "real")
    assert is_believed(link, UID)
    os.lchown(link, SOMEBODY, SOMEBODY)
    assert not is_believed(link, UID)


@as_root
def test_a_process_of_somebody_else_is_not_believed(sockets: Path) -> None:
    """Root believes it in a directory of its user's only, as a service has one."""
    sockets.chmod(0o777)
    with somebody_listens(sockets / "x.sock"):
        with pytest.raises(NoHarvester, match=rf"is not trusted: it runs as uid {SOMEBODY}") as doubted:
            Connection(sockets / "x.sock")
        assert "or by the owner of that directory" in str(doubted.value.hint)
        os.chown(sockets, SOMEBODY, SOMEBODY)
        Connection(sockets / "x.sock").close()
