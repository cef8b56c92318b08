"""The documentation: links lead somewhere, every page is in the index, and no code block is wrong by itself.

Blocks are executed by the tests named below; all others are at least read here: commands by the command line's own
parser, settings by the configuration, Python by its compiler and for what it imports from us.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from harvester_cli.main import app
from typer.main import get_command

from harvester.config.load import build, interpolate_table
from harvester.errors import ConfigurationError
from scripts import docsite

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
# Whose blocks are run, in which languages, and by whom.
EXECUTED = {
    "README.md": ({"console", "sql", "python"}, "tests/cli/test_readme.py"),
    "docs/tutorial.md": ({"console", "toml", "python", ""}, "tests/cli/test_tutorial.py"),
    "docs/writing.md": ({"console", "sql", "python"}, "tests/integration/test_writing_page.py"),
    "docs/consuming.md": ({"python"}, "tests/integration/test_consuming_page.py"),
    "docs/consumers.md": ({"sql", "python"}, "tests/integration/test_consumers_page.py"),
    "docs/configuration.md": ({"toml"}, "tests/unit/config/test_model.py"),
    "docs/adr/0019-no-schedule-no-expiry-no-priorities.md": ({"sql"}, "tests/cli/test_readme.py"),
}
# What cannot be run, by language.
REASONS = {
    "": "a picture or a transcript",
    "console": "needs a machine or servers of its own; its commands are parsed",
    "sh": "needs a machine or servers of its own; its commands are parsed",
    "toml": "settings: read as a configuration",
    "json": "an example of output: read as JSON",
    "python": "part of a program: compiled, and its imports looked up",
    "sql": "for an administrator, or shown as it is made",
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def executed_by(self) -> str | None:
        languages, test = EXECUTED.get(str(self.page.relative_to(ROOT)), (set(), None))
        return test if self.language in languages else None


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^(```+)(\w*)\n(.*?)^\1[ ]*$", text, re.MULTILINE | re.DOTALL):
            yield Block(page, text.count("\n", 0, found.start()) + 1, found[2], found[3])


BLOCKS = list(blocks())


def of(*languages: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=[block.name for block in chosen])


# --- links


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        anchors.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in slugs(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_an_index() -> None:
    indexes = [DOCS / "README.md", DOCS / "adr" / "README.md"]
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in indexes
        for link in re.findall(r"\]\(([^)]+)\)", index.read_text(encoding="utf-8"))
    }
    assert set(DOCS.rglob("*.md")) - linked == {DOCS / "README.md"}


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("adr/0001.md", "[a](../faq.md#b) [c](#d) [e](https://f)", "[a](../faq.md#b) [c](#d) [e](https://f)"),
        ("README.md", "[a](../README.md) [b](adr)", "[a](project/README.md) [b](adr/README.md)"),
        ("project/README.md", "![a](docs/images/b.svg) [c](LICENSE)", "![a](../images/b.svg) [c](LICENSE)"),
        ("faq.md", "```\n[a](../README.md)\n```\n[b](../nowhere)", "```\n[a](../README.md)\n```\n[b](../nowhere)"),
    ],
)
def test_links_lead_to_the_same_place_on_the_site(page: str, text: str, expected: str) -> None:
    assert docsite.rewritten(text, page) == expected


def test_anchors_are_made_as_github_makes_them() -> None:
    text = "# Why `x`, and [y](z)?\n## A, b\n## A, b\n```\n# no heading\n```\n"
    assert slugs(text) == {"why-x-and-y", "a-b", "a-b-1"}


# --- blocks


def commands(block: Block) -> list[list[str]]:
    """The calls of `harvester` in a block, without prompts, comments, pipes and redirections."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        plain = re.sub(r"[ ]>>?[ ]*\S+", "", line.removeprefix("$ "))
        for part in re.split(r"[|;]|&&|\$\(", plain):
            try:
                words = shlex.split(part.rstrip('")') if part.count('"') % 2 else part, comments=True)
            except ValueError:
                continue
            if words and words[0].rpartition("/")[2] == "harvester" and "…" not in words:
                found.append(words[1:])
    return found


def parse(arguments: list[str]) -> None:
    """As the command line would, up to the point where the command would run."""
    command: Any = get_command(app)
    context = command.make_context("harvester", list(arguments), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@of("console", "sh")
def test_commands_exist_with_their_options(block: Block) -> None:
    for arguments in commands(block):
        try:
            parse(arguments)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block.name}: harvester {' '.join(arguments)}: {error}") from error


def test_commands_are_found() -> None:
    """Else the test above would be happy with none."""
    found = [arguments for block in BLOCKS for arguments in commands(block)]
    assert len(found) > 40
    assert ["start", "--until-empty"] in found
    with pytest.raises(AssertionError):
        test_commands_exist_with_their_options(
            Block(DOCS / "x.md", 1, "sh", "harvester start --no-such-option | tee x\n")
        )


@of("toml")
def test_settings_are_a_configuration(block: Block) -> None:
    try:
        whole = [tomllib.loads(block.text)]
    except tomllib.TOMLDecodeError:  # alternatives, one a line
        whole = [tomllib.loads(line) for line in block.text.splitlines()]
    for settings in whole:
        variables = dict.fromkeys(re.findall(r"\$\{(\w+)", block.text), "x")
        resolved, problems = interpolate_table({"leader_group_id": "g", **settings}, variables)
        try:
            build({**resolved, **({"data_source": "host=x"} if "data_source" in resolved else {})})
        except ConfigurationError as error:
            problems += error.problems
        assert problems == []


@of("python")
def test_python_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text, block.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("harvester", "harvester_cli"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@of("json")
def test_examples_of_output_are_json(block: Block) -> None:
    import json

    decoder, text = json.JSONDecoder(), block.text.strip()
    while text:
        _, end = decoder.raw_decode(text)
        text = text[end:].strip()


def test_how_many_blocks_are_not_executed() -> None:
    for page, (_, test) in EXECUTED.items():
        assert (ROOT / page).is_file()
        assert (ROOT / test).is_file()
    rest = Counter(REASONS.get(block.language, "not of ours") for block in BLOCKS if block.executed_by is None)
    told = "; ".join(f"{count} {reason}" for reason, count in rest.most_common())
    summary = f"{rest.total()} of {len(BLOCKS)} code blocks of the documentation are not executed: {told}"
    print(summary)
    warnings.warn(summary, stacklevel=1)  # which pytest shows at the end of a run, in whichever process this is
    assert rest.total() < len(BLOCKS)


# --- the rules


def test_every_rule_that_the_code_names_is_in_the_protocol() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "protocol").glob("*.md"))
    told = set(re.findall(r"^### (P\d+)\.", pages, re.M))
    named = {
        rule
        for place in ("harvester", "cli", "tests", "docs")
        for file in (ROOT / place).rglob("*")
        if file.suffix in (".py", ".md")
        for rule in re.findall(r"\bP(?:[1-9]|[1-5][0-9])\b(?![-'\w])", file.read_text(encoding="utf-8"))
    }
    assert named - told == set()
    assert len(told) == 51


def test_the_modules_and_tests_that_the_protocol_names_exist() -> None:
    page = (DOCS / "protocol" / "relay.md").read_text(encoding="utf-8")
    modules = {name for name in re.findall(r"`([\w/]+\.py)`", page) if not name.startswith(("test_", "tests/"))}
    assert [name for name in sorted(modules) if not (ROOT / "harvester" / name).exists()] == []
    tests = {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`(test_\w+)`", page)) - tests == set()


def test_what_the_protocol_names_within_tests_exists() -> None:
    """Tests, breaks and transcripts, each as a whole or, with an ellipsis, in part."""
    page = re.sub(r"`[^`]*`", "", (DOCS / "protocol" / "relay.md").read_text(encoding="utf-8"))
    named = {name.strip("…") for name in re.findall(r"…?[a-z]\w*_\w+…?", page)}
    files = list((ROOT / "tests").rglob("*.*"))
    defined = {file.stem for file in files}
    for file in files:
        if file.suffix == ".py":
            defined |= set(re.findall(r'(?:def |class |")(\w+)', file.read_text(encoding="utf-8")))
    everything = "\n".join(defined)
    assert len(named) > 100
    assert {name for name in named if name not in everything} == set()


@pytest.mark.parametrize("place", ["harvester", "cli", "scripts", "docs"])
def test_nothing_cites_a_document_that_is_not_in_the_repository(place: str) -> None:
    """Pages made of docstrings are not read again."""
    cited = re.compile(r"\bseeds? 0\d\d|\bthe seed's\b|\bdesign section\b|\.\./shared|See the module's text")
    files = [file for file in (ROOT / place).rglob("*") if file.suffix in (".py", ".md", ".sql")]
    files = [file for file in files if file.name not in ("api.md", "map.md")]
    assert len(files) > 20
    assert [file for file in files if cited.search(file.read_text(encoding="utf-8"))] == []
