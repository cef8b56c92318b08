"""The API reference, made from the sources: `python -m scripts.apipage` writes it to standard output (Markdown).

griffe reads the sources without importing them, so the page is the same on every Python, whatever extras are installed.
It is a file in the repository, not a page of mkdocstrings directives, so that it can be read on a forge as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from textwrap import indent

import griffe

ROOT = Path(__file__).parents[1]

# Title, introduction, and the names, as "module: name name". A package's names are followed to their modules.
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
        "Deserialisers",
        "From consumed records to values ([examples](consuming.md#values)). A serialiser reads what it writes.",
        (
            "harvester.serializers: Values Deserializer",
            "harvester.serializers.registry: read_avro read_json_schema read_protobuf RegistryDeserializer",
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
        "Large values",
        "Values that lie in a store beside Kafka: [large values](large-values.md).",
        (
            "harvester: ClaimChecks StoreSettings ClaimCheckError",
            "harvester.claim_check: ResolvedRecord",
            "harvester.errors: StoreUnavailable StoredValueMissing StoredValueChanged",
        ),
    ),
    (
        "Coordinated consumers",
        "Processes that share partitions through Kafka alone: [consuming](consuming.md).",
        (
            "harvester: CoordinatedConsumer AsyncCoordinatedConsumer ConsumerSettings",
            "harvester.coordination.events: Claimed Released Lost Paused Resumed Blocked Unblocked OutOfRange GivenUp",
            "harvester.coordination.settings: Statistics",
            "harvester.http.consumers: ConsumerMetrics",
            "harvester.telemetry.tracing: traced",
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
            "harvester.errors: DeserializationFailed",
            "harvester: HarvesterError ConfigurationError LeaseError LeaseExpired LeaseFenced LeaseUnknown SequenceGap",
            "harvester.idempotence: InboxError InboxUnavailable InboxFenced CorruptSeenIds",
        ),
    ),
)
_BASE = re.compile(r"\w+(?:Base|Core)")
_SETTINGS = {"Config", "Limits"}  # whose fields are in docs/configuration.md
_NOT_SHOWN = ("_", "Generic", "Protocol", "NamedTuple", "Settings", "StrEnum")  # bases that say nothing to a user


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
    """`module.name` of everything on the page."""
    groups = (group.partition(": ") for _, _, names in SECTIONS for group in names)
    return {f"{module}.{name}" for module, _, listed in groups for name in listed.split()}


@cache
def _sources() -> griffe.Object | griffe.Alias:
    return griffe.load("harvester", search_paths=[ROOT], allow_inspection=False)


def entry(module: str, name: str) -> str:
    """Everything about one name; imports are followed to its definition."""
    found = _sources()[f"{module}.{name}".removeprefix("harvester.")]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    parts = [f"### {name}", f"`from {module} import {name}`"]
    match found:
        case griffe.Class():
            parts += _class(found)
        case griffe.Function():
            parts += [f"`{_call(found)}`", _doc(found)]
        case _:
            parts += [f"`{_source(found).partition('  # ')[0]}`"]
    return "\n\n".join(part for part in parts if part)


def _class(found: griffe.Class) -> Iterator[str]:
    members = _members(found, {})
    init, types = members.pop("__init__", (None, {}))
    if isinstance(init, griffe.Function) and found.name not in _SETTINGS:
        yield f"`{_filled(init.signature(name=found.name, return_type=False), types)}`"
    if bases := list(_kinds(found)):
        yield f"A kind of {', '.join(f'`{base}`' for base in bases)}."
    yield _doc(found)
    if init is not None:
        yield _doc(init)
    shown = [(member, types) for name, (member, types) in members.items() if _is_public(name)]
    fields = [each for each in found.members.values() if _is_public(each.name) and _is_field(each)]
    declared = [_field(each) for each in fields if found.name not in _SETTINGS]
    lines = [_bullet(*each) for each in declared if not each[0].startswith("self.")]
    lines += [_bullet(_filled(_member(each), types), _doc(each)) for each, types in shown if not _is_field(each)]
    yield "\n".join(lines)


def _members(
    found: griffe.Class, types: dict[str, str]
) -> dict[str, tuple[griffe.Object | griffe.Alias, dict[str, str]]]:
    """The members of a class, then those of its bases named …Base or …Core, which are not on the page by themselves.

    Each with the types that replace the type variables in it.
    """
    # Without a line number: that of a dataclass, which is not in the source.
    members = {each.name: (each, types) for each in found.members.values() if each.lineno and not each.is_alias}
    internal = {each.name: each for each in found.mro() if _BASE.fullmatch(each.name)}
    for base in found.bases:
        if (definition := internal.get(str(base).partition("[")[0])) is None:
            continue
        given = [_filled(str(each).strip("'\""), types) for each in _arguments(base)]
        generic = next((str(each) for each in definition.bases if str(each).startswith("Generic[")), "Generic[]")
        variables = generic.removeprefix("Generic[").removesuffix("]").split(", ")
        for name, member in _members(definition, dict(zip(variables, given, strict=False))).items():
            members.setdefault(name, member)
    return members


def _arguments(base: str | griffe.Expr) -> Sequence[str | griffe.Expr]:
    """What stands in the brackets behind a base."""
    if not isinstance(base, griffe.ExprSubscript):
        return ()
    return base.slice.elements if isinstance(base.slice, griffe.ExprTuple) else (base.slice,)


def _kinds(found: griffe.Class) -> Iterator[str]:
    internal = {definition.name: definition for definition in found.mro() if _BASE.fullmatch(definition.name)}
    for base in found.bases:
        name = str(base).partition("[")[0]
        if name in internal:
            yield from _kinds(internal[name])
        elif not name.startswith(_NOT_SHOWN):
            yield str(base)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__iter__", "__call__")


def _is_field(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_attribute and "property" not in member.labels


def _filled(text: str, types: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: types.get(word[0], word[0]), text) if types else text


def _source(member: griffe.Object | griffe.Alias) -> str:
    return "\n".join(member.lines).strip()


def _field(field: griffe.Object | griffe.Alias) -> tuple[str, str]:
    """A field, and the comment at the end of its line."""
    shown, _, comment = _source(field).partition("  # ")
    return shown, comment


def _member(member: griffe.Object | griffe.Alias) -> str:
    if isinstance(member, griffe.Function):
        return "".join(f"{word} " for word in ("classmethod", "staticmethod") if word in member.labels) + _call(member)
    return f"{member.name}: {member.annotation}" if isinstance(member, griffe.Attribute) else member.name  # a property


def _call(function: griffe.Function) -> str:
    return ("async " if "async" in function.labels else "") + function.signature(name=function.name)


def _bullet(shown: str, text: str) -> str:
    if text and ("\n" in text or len(shown) > 60):
        return f"- `{shown}`\n\n{indent(text, '    ')}\n"
    return f"- `{shown}`" + (f": {text}" if text else "")


def _doc(found: griffe.Object | griffe.Alias) -> str:
    """Its docstring; `<` and `*` outside of code would be HTML and emphasis."""
    text = found.docstring.value if found.docstring else ""
    return "\n".join(line if line.startswith("    ") else _escape(line) for line in text.splitlines())


def _escape(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    print(page(), end="")
