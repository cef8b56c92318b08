"""The API reference, made from the sources: `python -m scripts.apipage` writes it to standard output (Markdown).

Sources are read, not imported: the page is the same on every Python, whatever extras are installed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Title, what is to be said first, and the names: "module: name name"; a package's names are looked up where they live.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Run a harvester",
        "[Embedding](embedding.md) has examples. Every setting of `Config` and `Limits` is in"
        " [configuration.md](configuration.md).",
        ("harvester: Harvester Config Limits load_config FakeGroup",),
    ),
    (
        "Status and events",
        "What `Harvester.status()` returns, and what the handler `on_event` is given.",
        (
            "harvester: Status State",
            "harvester.status: ShardStatus ShardState Backlog",
            "harvester: Event LeaderAcquired LeaderRefreshed LeaderRevoked LeaderFenced MeterRead",
        ),
    ),
    (
        "Write records",
        "[Writing records](writing.md) shows them at work. The stashers for SQLAlchemy, Django and asyncpg come with"
        " the extras of their names.",
        (
            "harvester: OutboxRecord Stasher AsyncStasher LeasedStasher AsyncLeasedStasher Lease Stashed",
            "harvester.outbox.lease_steps: Numbered",
            "harvester.writers.sqlalchemy: SqlalchemyStasher AsyncSqlalchemyStasher SqlalchemyLeasedStasher"
            " AsyncSqlalchemyLeasedStasher",
            "harvester.writers.asyncpg: AsyncpgStasher AsyncpgLeasedStasher",
            "harvester.writers.django: DjangoStasher DjangoLeasedStasher stash stash_many",
        ),
    ),
    (
        "Serialisers",
        "From values to records ([examples](writing.md#serialisers)).",
        (
            "harvester.serializers: Records CloudEvents Serializer Serialized Bytes Text Json",
            "harvester.serializers.records: cloud_event_headers",
            "harvester.serializers.msgspec: Msgspec",
            "harvester.serializers.registry: avro json_schema protobuf RegistrySerializer",
        ),
    ),
    (
        "Recognise repeats",
        "For consumers: [consumers.md](consumers.md).",
        (
            "harvester.origin: Origin find decode",
            "harvester.idempotence: SeenIds Novelty Inbox AsyncInbox Batch Effect Position table_sql",
        ),
    ),
    (
        "Coordinated consumers",
        "Processes that share partitions through Kafka alone: [coordination](protocol/coordination.md).",
        (
            "harvester.coordination.consumer: CoordinatedConsumer",
            "harvester.coordination.settings: ConsumerSettings",
            "harvester.coordination.events: Claimed Released Lost Paused Resumed OutOfRange",
            "harvester.coordination.settings: Statistics",
            "harvester.http.consumers: ConsumerMetrics",
        ),
    ),
    (
        "Judge a run",
        "",
        ("harvester.verify.sequences: Sequences",),
    ),
    (
        "Errors",
        "All of them are `HarvesterError`; `message` tells what happened, `hint` what to do.",
        (
            "harvester: HarvesterError ConfigurationError LeaseError LeaseExpired LeaseFenced LeaseUnknown SequenceGap",
            "harvester.idempotence: InboxError InboxFenced CorruptSeenIds",
        ),
    ),
)
_BASE = re.compile(r"(\w+(?:Base|Core))\b")
_SETTINGS = {"Config", "Limits"}  # whose fields are in docs/configuration.md


def page() -> str:
    """The whole page."""
    parts = [
        "# API reference",
        "Made by `scripts/api` from signatures and docstrings. What is not here is internal and may change.",
    ]
    for title, first, names in SECTIONS:
        parts += [f"## {title}", first] if first else [f"## {title}"]
        for group in names:
            module, _, listed = group.partition(": ")
            parts += [entry(module, name) for name in listed.split()]
    return "\n\n".join(parts) + "\n"


def public_names() -> set[str]:
    """`module.name` of everything that is on the page."""
    groups = (group.partition(": ") for _, _, names in SECTIONS for group in names)
    return {f"{module}.{name}" for module, _, listed in groups for name in listed.split()}


# -- sources


@cache
def _source(module: str) -> tuple[ast.Module, list[str]]:
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _find(module: str, name: str) -> tuple[str, ast.stmt]:
    """Where a name is defined, and its definition; imports are followed."""
    tree, _ = _source(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _find(_absolute(module, node), name)
    raise LookupError(f"{module} has no {name}")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return str(node.module)
    package = module if (ROOT / Path(*module.split("."))).is_dir() else module.rpartition(".")[0]
    return ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], str(node.module)])


# -- entries


def entry(module: str, name: str) -> str:
    """All about one name."""
    home, node = _find(module, name)
    parts = [f"### {name}", f"`from {module} import {name}`"]
    match node:
        case ast.ClassDef():
            parts += _class(home, node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            parts += [f"`{_call(node, name)}`", _doc(home, node)]
        case ast.Assign():
            parts += [f"`{ast.unparse(node)}`"]
        case _:
            raise LookupError(f"{home}.{name} is neither class nor function")
    return "\n\n".join(part for part in parts if part)


def _class(module: str, node: ast.ClassDef) -> Iterator[str]:
    shown = list(_kinds(module, node))
    functions = list(_methods(module, node, {}))
    inits = ((home, each, types) for home, each, types in functions if each.name == "__init__")
    home, init, types = next(inits, (module, None, {}))
    if init is not None and node.name not in _SETTINGS:
        yield f"`{_filled(_call(init, node.name), types).partition(' -> ')[0]}`"
    if shown:
        yield f"A kind of {', '.join(f'`{base}`' for base in shown)}."
    yield _doc(module, node)
    if init is not None:
        yield _doc(home, init)
    members = []
    if node.name not in _SETTINGS:
        members += [_bullet(*field) for field in _fields(module, node)]
    members += [
        _bullet(_filled(_member(each), types), _doc(home, each))
        for home, each, types in functions
        if not each.name.startswith("_") or each.name in ("__iter__", "__call__")
        if not any(ast.unparse(decorator).endswith((".setter", "overload")) for decorator in each.decorator_list)
    ]
    yield "\n".join(members)


def _kinds(module: str, node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        if found := _BASE.match(ast.unparse(base)):
            home, definition = _find(module, found[1])
            assert isinstance(definition, ast.ClassDef)
            yield from _kinds(home, definition)
        elif not ast.unparse(base).startswith(("_", "Generic", "Protocol", "NamedTuple", "Settings", "StrEnum")):
            yield ast.unparse(base)


def _methods(
    module: str, node: ast.ClassDef, types: dict[str, str]
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, dict[str, str]]]:
    """The functions of a class, then those of its bases named …Base or …Core, which are not on the page by themselves.

    Each with its module, and what stands for the type variables in it.
    """
    own = _functions(node)
    yield from ((module, each, types) for each in own)
    seen = {each.name for each in own}
    for base in node.bases:
        if not (found := _BASE.match(ast.unparse(base))):
            continue
        home, definition = _find(module, found[1])
        assert isinstance(definition, ast.ClassDef)
        given: list[str] = []
        if isinstance(base, ast.Subscript):
            parts = base.slice.elts if isinstance(base.slice, ast.Tuple) else [base.slice]
            given = [_filled(ast.unparse(part).strip("'"), types) for part in parts]
        variables = [
            ast.unparse(each)[8:-1].split(", ") for each in definition.bases if "Generic[" in ast.unparse(each)
        ]
        for inherited in _methods(home, definition, dict(zip(variables[0] if variables else [], given, strict=False))):
            if inherited[1].name not in seen:
                seen.add(inherited[1].name)
                yield inherited


def _filled(text: str, types: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: types.get(word[0], word[0]), text) if types else text


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(module: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Each with the comment at the end of its line."""
    _, lines = _source(module)
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            default = "" if each.value is None else f" = {ast.unparse(each.value)}"
            shown = ast.unparse(each.target) + f": {ast.unparse(each.annotation)}" + default
        elif isinstance(each, ast.Assign):
            shown = ast.unparse(each)
        else:
            continue
        if not shown.startswith("_"):
            comment = re.search(r"  # (.+)$", lines[(each.end_lineno or each.lineno) - 1])
            yield shown, comment[1] if comment else ""


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if "property" in decorators:
        return f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
    prefix = "".join(f"{word} " for word in decorators if word in ("classmethod", "staticmethod"))
    return prefix + _call(node, node.name)


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """The signature in one line, without `self`."""
    arguments = re.sub(r"^(self|cls)(, /)?(, |$)", "", _arguments(node.args))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    begin = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{begin}{name}({arguments}){returns}"


def _arguments(given: ast.arguments) -> str:
    """As people write them: `ast` puts no spaces around the default of an argument that has a type."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    shown = [_argument(*each) for each in zip(positional, defaults, strict=True)]
    if given.posonlyargs:
        shown.insert(len(given.posonlyargs), "/")
    if given.vararg:
        shown.append(f"*{_argument(given.vararg)}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_argument(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return ", ".join([*shown, f"**{_argument(given.kwarg)}"] if given.kwarg else shown)


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    typed = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    equals = " = " if typed else "="
    return f"{argument.arg}{typed}" + ("" if default is None else f"{equals}{ast.unparse(default)}")


def _bullet(shown: str, text: str) -> str:
    indented = "\n".join(f"  {line}" if line else "" for line in text.splitlines())
    return f"- `{shown}`" + (f"\\\n{indented}" if "\n" in text or len(shown) > 60 else f": {text}" if text else "")


def _doc(module: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Its docstring, or the module's where it says so; `<` outside of code would be HTML."""
    text = ast.get_docstring(node) or ""
    if text.startswith("See the module's text."):
        rest = text.removeprefix("See the module's text.").strip()
        text = "\n\n".join(filter(None, [inspect.cleandoc(ast.get_docstring(_source(module)[0]) or ""), rest]))
    return "\n".join(line if line.startswith("    ") else _escape(line) for line in text.splitlines())


def _escape(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    print(page(), end="")
