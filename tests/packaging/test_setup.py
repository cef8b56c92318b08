"""The locks, and `scripts/setup`."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sysconfig
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.packaging.test_wheel import BUILD, NOT_SHIPPED, ROOT, clean

pytestmark = pytest.mark.timeout(300)


def test_every_lock_has_the_same_pins() -> None:
    """requirements.lock is what is tested; the others are parts of it, but for Spark."""

    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / name).read_text(), re.MULTILINE))

    everything = pins("requirements.lock")
    assert pins("requirements-demo.lock").items() <= everything.items()
    assert pins("deploy/requirements.lock").items() <= everything.items()
    spark = pins("requirements-spark.lock")
    assert {name for name in spark if spark[name] != everything.get(name)} >= {"pyspark", "py4j"}
    assert all(everything.get(name, version) == version for name, version in spark.items())
    assert not {"pyspark", "py4j"} & set(everything)
    assert not {"pytest", "mypy", "django"} & set(pins("requirements-demo.lock"))


def test_where_there_is_no_uv_pip_installs(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in (*BUILD, "requirements.lock", "requirements-demo.lock", "scripts/setup"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=NOT_SHIPPED)
        else:
            shutil.copy(ROOT / name, checkout / name)
    place = checkout / ".venv"
    venv.create(place, with_pip=False, symlinks=True)
    site = next(place.glob("lib/python*/site-packages"))
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    version = subprocess.run([place / "bin/python", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256((checkout / "requirements.lock").read_bytes()).hexdigest()
    (place / ".lock.stamp").write_text(f"{checkout} {version.strip()} {digest}  -\n")  # dependencies are there

    for _ in range(2):
        done = subprocess.run(
            [checkout / "scripts/setup", "--no-broker"], capture_output=True, text=True, env=clean(), check=False
        )
        assert done.returncode == 0, done.stderr
        names = {found.metadata["Name"] for found in distributions(path=[str(site)])}
        assert names == {"outbox-harvester"}
    assert not (place / "bin/uv").exists()
    shown = subprocess.run([place / "bin/harvester", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("harvester ")
