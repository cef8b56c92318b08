"""Which dead letters a command is about: options that all of them share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

if TYPE_CHECKING:
    from harvester.outbox.dead import Chosen

TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", help="Records of this topic; may be given several times.")
]
KeyOption = Annotated[str | None, typer.Option("--key", help="Records of this key, as text.")]
KeyBase64Option = Annotated[
    str | None, typer.Option("--key-base64", metavar="BASE64", help="Records of this key, where it is no text.")
]
ErrorOption = Annotated[str | None, typer.Option("--error", help="Records whose error contains this, in any case.")]
ErrorRegexOption = Annotated[
    str | None, typer.Option("--error-regex", metavar="REGEX", help="Records whose error matches this, in any case.")
]
IdOption = Annotated[
    list[int] | None, typer.Option("--id", help="The record with this id; may be given several times.")
]
IncarnationOption = Annotated[
    UUID | None, typer.Option("--incarnation", help="Of this id space, where ids have started again.")
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="WHEN", help="Quarantined since then: 2h, 7d, 2026-01-31, 2026-01-31T12:00:00Z."),
]


def chosen(
    *,
    topic: list[str] | None,
    key: str | None,
    key_base64: str | None,
    error: str | None,
    error_regex: str | None,
    id_: list[int] | None,
    incarnation: UUID | None,
    since: str | None,
    limit: int | None,
) -> Chosen:
    """The options as a choice; raises typer.BadParameter for what cannot be read."""
    from harvester.outbox.dead import Chosen

    if key is not None and key_base64 is not None:
        raise typer.BadParameter("a key is given as text or as base64, not both", param_hint="--key-base64")
    return Chosen(
        topics=topic or (),
        ids=id_ or (),
        incarnation=incarnation,
        key=_decoded(key_base64) if key_base64 is not None else key.encode() if key is not None else None,
        error=error,
        error_pattern=error_regex,
        since=_moment(since) if since is not None else None,
        limit=limit,
    )


def is_everything(choice: Chosen) -> bool:
    """Whether no condition was given."""
    from harvester.outbox.dead import Chosen

    return choice == Chosen(limit=choice.limit)


def _decoded(text: str) -> bytes:
    import base64
    import binascii

    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise typer.BadParameter(f"is no base64: {error}", param_hint="--key-base64") from error


def _moment(text: str) -> datetime | timedelta:
    from harvester.config import parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            "is neither a duration (2h, 7d) nor a time (ISO 8601)", param_hint="--since"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
