"""Log in, world out: the files under transcripts/ (format and rewriting: tests/support/transcripts.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.transcripts import Transcript

TRANSCRIPTS = Path(__file__).parent / "transcripts"
FILES = sorted(TRANSCRIPTS.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_transcript(file: Path) -> None:
    text = file.read_text()
    transcript = Transcript()
    blocks = []
    for block in text.rstrip("\n").split("\n\n"):
        lines = block.split("\n----")[0].split("\n")
        said = [line for line in lines if not line.startswith("#")]
        blocks.append("\n".join([*lines, "----", *transcript.answer(said)]) if said else block)
    found = "\n\n".join(blocks) + "\n"
    if os.environ.get("HARVESTER_REWRITE"):
        file.write_text(found)
    assert found == text


def test_there_are_transcripts() -> None:
    assert len(FILES) > 15
