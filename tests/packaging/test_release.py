"""`scripts/release`: what it writes, what it refuses, and (long) a whole rehearsal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

from scripts import releasing
from scripts.releasing import Place, Refused, changelog_of, order, with_version
from tests.support.longs import long

ROOT = Path(__file__).parents[2]
TODAY = date(2026, 1, 2)
CHANGES = "# Changelog\n\n## Unreleased\n\n### Fixed\n\n- One thing.\n\n## [0.1.0] - 2025-01-01\n\n- The first.\n"


def test_versions_are_ordered() -> None:
    versions = ["0.1.0", "0.2.0a1", "0.2.0b1", "0.2.0rc1", "0.2.0rc2", "0.2.0", "0.2.1", "0.10.0", "1.0.0"]
    assert sorted(sorted(versions), key=order) == versions  # 0.10.0 stands elsewhere in the alphabet


@pytest.mark.parametrize("version", ["1", "1.2", "v1.2.3", "1.2.3.4", "1.2.3-rc1", "1.2.3rc", ""])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(Refused, match="is not a version"):
        order(version)


def test_the_changelog_gets_a_section_and_an_empty_one() -> None:
    text = changelog_of(CHANGES, "0.2.0", TODAY)
    assert text == CHANGES.replace("## Unreleased\n", "## Unreleased\n\n## [0.2.0] - 2026-01-02\n")
    with pytest.raises(Refused, match="nothing that is unreleased"):
        changelog_of(text, "0.3.0", TODAY)
    with pytest.raises(Refused, match=r"section for 0\.2\.0 already"):
        changelog_of(text, "0.2.0", TODAY)
    with pytest.raises(Refused, match="no section"):
        changelog_of("# Changelog\n", "0.2.0", TODAY)


def test_all_files_name_one_version() -> None:
    found = {}
    for place in releasing.VERSIONED:
        text = (ROOT / place.file).read_text()
        match = re.search(place.pattern, text)
        assert match, place
        found[place.file, place.pattern] = match[2]
        assert f"{match[1]}9.8.7" in with_version(place, text, "9.8.7")
        assert with_version(place, text, match[2]) == text
    assert len(set(found.values())) == 1, found
    assert with_version(Place("x", "(v)(.+)", semantic=True), "v1.0.0", "1.2.0rc3") == "v1.2.0-rc.3"
    manifests = (ROOT / "deploy" / "kubernetes" / "harvester.yaml").read_text()
    assert set(re.findall(r'(?m)image: "harvester:(.+)"$', manifests)) == set(found.values())
    with pytest.raises(Refused, match="names no version"):
        with_version(Place("x", "(a)(b)"), "nothing", "1.2.3")


@pytest.mark.parametrize(
    ("remote", "same"),
    [
        ("git@github.com:one/two.git", True),
        ("https://github.com/one/two", True),
        ("https://somebody:token@github.com/one/two.git", True),
        ("ssh://git@github.com/one/two.git", True),
        ("git@github.com:other/two.git", False),
        ("/home/somebody/two", False),
    ],
)
def test_a_remote_is_the_source_by_whichever_protocol(remote: str, same: bool) -> None:
    assert releasing._same("https://github.com/one/two", remote) is same


@pytest.mark.parametrize(("version", "words"), [("0.0.1", "is older than"), ("1", "is not a version")])
def test_a_release_that_cannot_be_is_one_line(version: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert releasing.main([version]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.splitlines()) == 1


def test_the_script_can_upload_nothing() -> None:
    """It names the command for a person, in what it says at the end."""
    text = (ROOT / "scripts" / "releasing.py").read_text()
    assert [line.strip() for line in text.splitlines() if "twine upload" in line or '"push"' in line] == [
        line.strip() for line in text.splitlines() if "left to do" in line
    ]


@long
@pytest.mark.timeout(1500)
def test_a_rehearsal_makes_all_of_a_release() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        ["scripts/release", "98.7.6", "--rehearse"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out = releasing.PLACE / "dist"
    stem = "outbox_harvester-98.7.6"
    assert {file.name for file in out.iterdir()} == {
        f"{stem}-py3-none-any.whl", f"{stem}.tar.gz", f"{stem}.cdx.json", "SHA256SUMS",
    }  # fmt: skip
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    bill = json.loads((out / f"{stem}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "outbox-harvester"
    names = {component["name"] for component in bill["components"]}
    assert {"confluent-kafka", "psycopg", "psycopg-binary", "pydantic", "typer"} <= names
    assert not names & {"pip", "pytest", "pyspark"}
    assert all(component.get("purl") for component in bill["components"] if component["name"] != "outbox-harvester")
    after = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tags = subprocess.run(["git", "tag", "--list", "v98*"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (after, tags) == (head, "")
    assert os.environ.get("SOURCE_DATE_EPOCH") is None
