"""Stashers over SQLAlchemy, Django and asyncpg (docs/writing.md).

Each module comes with the extra of its name, imports its library itself, and is imported by nothing else here. What
they share with the stashers for psycopg is in `harvester.outbox`: `lease_steps`, `stasher` and `async_stasher`.
"""
