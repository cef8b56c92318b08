"""Where control sockets are."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harvester.control.sockets import SYSTEM, choices, file_name, fits, looked_through

UID = os.getuid()


def test_the_services_directory_is_the_only_one(tmp_path: Path) -> None:
    environ = {"RUNTIME_DIRECTORY": "/run/harvester/a:/run/other", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert choices(environ, UID, "/tmp") == [Path("/run/harvester/a")]
    assert looked_through(environ, UID, "/tmp") == [Path("/run/harvester/a")]


def test_the_users_runtime_directory_comes_first(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert choices(environ, UID, "/t")[0] == tmp_path / "harvester"
    assert choices(environ, UID, "/t")[-1] == Path(f"/t/harvester-{UID}")


def test_a_runtime_directory_of_somebody_else_is_none(tmp_path: Path) -> None:
    assert choices({"XDG_RUNTIME_DIR": str(tmp_path)}, UID + 1, "/t") == [Path(f"/t/harvester-{UID + 1}")]
    assert choices({"XDG_RUNTIME_DIR": "/none/such"}, 1000, "/t") == [Path("/t/harvester-1000")]


def test_root_has_the_systems(tmp_path: Path) -> None:
    assert choices({}, 0, "/t", tmp_path) == [tmp_path, Path("/t/harvester-0")]
    assert choices({}, 0, "/t")[0] == SYSTEM == Path("/run/harvester")


def test_whoever_looks_finds_services_and_their_instances(tmp_path: Path) -> None:
    (tmp_path / "billing").mkdir()
    (tmp_path / "x.sock").touch()
    assert looked_through({}, 1000, "/t", tmp_path) == [Path("/t/harvester-1000"), tmp_path, tmp_path / "billing"]


def test_a_file_name_reads_as_the_name() -> None:
    assert file_name("billing-1") == "billing-1.sock"
    assert file_name("db1_4711_1700000000") == "db1_4711_1700000000.sock"
    assert file_name("../a b") == "%2E.%2Fa%20b.sock"


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200))
def test_any_name_is_a_short_file_name_of_its_own(one: str, other: str) -> None:
    name = file_name(one)
    assert Path(name).name == name
    assert not name.startswith(".")
    assert name.isascii()
    assert fits(Path("/run/user/1000000/harvester") / name)
    assert (name == file_name(other)) == (one == other)


def test_what_is_too_long_does_not_fit() -> None:
    assert fits("/" + "x" * 106)
    assert not fits("/" + "x" * 107)
