"""`harvester systemd install`: where it writes, what it leaves alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harvester_cli.systemd import NAMES, app, unit_text
from typer.testing import CliRunner

from harvester.errors import HarvesterError
from tests.support.cli import run_cli

SHIPPED = {
    name: (Path(__file__).parents[2] / "cli" / "harvester_cli" / "units" / name).read_text(encoding="utf-8")
    for name in NAMES
}
PROGRAM = str(Path(sys.executable).parent / "harvester")


def installed(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_for_a_user_in_their_own_directory(tmp_path: Path) -> None:
    done = run_cli("systemd", "install", "--user", env={"XDG_CONFIG_HOME": str(tmp_path)})
    folder = tmp_path / "systemd" / "user"
    assert installed(folder) == {name: unit_text(text, PROGRAM, user=True) for name, text in SHIPPED.items()}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert f"{folder}/harvester.service: written" in done.stdout
    assert "systemctl --user daemon-reload && systemctl --user enable --now harvester" in done.stdout
    text = (folder / "harvester.service").read_text(encoding="utf-8")
    assert f"ExecStart={PROGRAM} start --config %E/harvester/harvester.toml " in text
    assert "DynamicUser" not in text
    assert "/etc/harvester" not in text
    assert text.endswith("[Install]\nWantedBy=default.target\n")


@pytest.mark.parametrize("root", [False, True])
def test_a_relative_configuration_home_counts_as_not_set(tmp_path: Path, root: bool) -> None:
    home, image = tmp_path / "home", tmp_path / "image"
    home.mkdir()
    below = ["--root", str(image)] if root else []
    env = {"XDG_CONFIG_HOME": "config", "HOME": str(home)}
    run_cli("systemd", "install", "--user", *below, env=env, cwd=tmp_path)
    folder = home / ".config" / "systemd" / "user"
    assert set(installed(image / folder.relative_to("/") if root else folder)) == set(NAMES)
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize("hidden", [None, "program", "link", "python"])
def test_for_the_system_below_another_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str | None) -> None:
    home, opt = tmp_path / "home", tmp_path / "opt"
    monkeypatch.setattr("harvester_cli.systemd._HIDDEN", (f"{home}/",))
    for each in (home, opt):
        (each / "bin").mkdir(parents=True)
        for name in ("harvester", "python3"):
            (each / "bin" / name).touch(0o755)
    program, python = (home if hidden == "program" else opt) / "bin" / "harvester", opt / "bin" / "python"
    python.symlink_to((home if hidden == "python" else opt) / "bin" / "python3")
    if hidden == "link":
        program.unlink()
        program.symlink_to(home / "bin" / "harvester")
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setattr("sys.executable", str(python))
    done = CliRunner().invoke(app, ["install", "--system", "--root", str(tmp_path)])
    units = tmp_path / "etc" / "systemd" / "system"
    if hidden is not None:
        assert isinstance(done.exception, HarvesterError)
        name = "python3" if hidden == "python" else "harvester"
        assert str(done.exception).startswith(f"{home}/bin/{name} is in a directory that the unit hides")
        assert not units.exists()
        return
    assert installed(units) == {name: unit_text(text, str(program), user=False) for name, text in SHIPPED.items()}


def test_what_was_changed_is_left_alone_and_so_is_the_rest(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    folder = tmp_path / "systemd" / "user"
    folder.mkdir(parents=True)
    unit = folder / "harvester@.service"
    unit.write_text("[Service]\nExecStart=/mine\n", encoding="utf-8")
    refused = run_cli("systemd", "install", "--user", env=env, check=False)
    assert refused.returncode == 1
    assert f"nothing was written: {unit}\n" in refused.stderr
    assert "--force" in refused.stderr
    assert installed(folder) == {unit.name: "[Service]\nExecStart=/mine\n"}
    shown = run_cli("systemd", "install", "--user", "--dry-run", env=env).stdout
    assert f"{folder}/harvester.service: would be written" in shown
    assert f"{unit}: differs" in shown
    assert "-ExecStart=/mine" in shown
    assert f"+ExecStart={PROGRAM} " in shown
    assert installed(folder) == {unit.name: "[Service]\nExecStart=/mine\n"}
    run_cli("systemd", "install", "--user", "--force", env=env)
    assert set(installed(folder)) == set(NAMES)
    assert "/mine" not in installed(folder)[unit.name]
    again = run_cli("systemd", "install", "--user", env=env).stdout
    assert again.count(": unchanged") == 2


def test_a_unit_that_is_masked_stays_masked(tmp_path: Path) -> None:
    folder = tmp_path / "systemd" / "user"
    folder.mkdir(parents=True)
    (folder / "harvester.service").symlink_to(os.devnull)
    done = run_cli("systemd", "install", "--user", env={"XDG_CONFIG_HOME": str(tmp_path)}, check=False)
    assert done.returncode == 1
    assert (folder / "harvester.service").is_symlink()


def test_printing_writes_nothing(tmp_path: Path) -> None:
    done = run_cli("systemd", "install", "--system", "--print", "--root", str(tmp_path))
    for name, text in SHIPPED.items():
        assert f"# {name}\n{unit_text(text, PROGRAM, user=False)}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "systemd").write_text("a file")
    done = run_cli("systemd", "install", "--user", env={"XDG_CONFIG_HOME": str(tmp_path)}, check=False)
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--user", "--system"]])
def test_one_of_both_managers_has_to_be_named(options: list[str]) -> None:
    done = run_cli("systemd", "install", *options, check=False)
    assert done.returncode == 2
    assert "use --user or --system" in done.stderr
