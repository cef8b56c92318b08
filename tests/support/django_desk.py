"""Django, set up once in a process; a database of it for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict

_NAMES = {"dbname": "NAME", "host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}

if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["harvester.writers.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "none"}},
        USE_TZ=True,
    )
    django.setup()


@contextmanager
def database(dsn: str, alias: str | None = None) -> Iterator[str]:
    """The alias under which Django knows this database meanwhile, a new one unless given."""
    alias = alias or f"test_{uuid.uuid4().hex[:8]}"
    options = conninfo_to_dict(dsn)
    given = {theirs: str(options[ours]) for ours, theirs in _NAMES.items() if options.get(ours)}
    before = connections.settings.get(alias)
    connections.settings[alias] = {**connections.settings["default"], **given}
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias], connections.settings[alias]
        if before is not None:
            connections.settings[alias] = before


class _Desk:
    def __init__(self, alias: str, table: str) -> None:
        from harvester.writers.django import DjangoStasher

        self.alias, self.stasher = alias, DjangoStasher(table, alias)
        self.stash, self.stash_many = self.stasher.stash, self.stasher.stash_many
        self.begin()

    stash: Any
    stash_many: Any

    def begin(self) -> None:
        self.block = transaction.atomic(using=self.alias)
        self.block.__enter__()

    def execute(self, statement: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self.block.__exit__(None, None, None)
        self.begin()

    def rollback(self) -> None:
        transaction.set_rollback(True, using=self.alias)
        self.commit()


@contextmanager
def opened(dsn: str, table: str) -> Iterator[_Desk]:
    """See `tests.support.desks`."""
    with database(dsn) as alias:
        desk = _Desk(alias, table)
        yield desk
        transaction.set_rollback(True, using=alias)
        desk.block.__exit__(None, None, None)
