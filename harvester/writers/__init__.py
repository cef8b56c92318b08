"""Stashers for SQLAlchemy, Django and asyncpg (docs/writing.md).

Each module belongs to the extra of its name and imports its library itself; nothing else here imports it. The part
common with the stashers for psycopg is in `harvester.outbox`: `lease_steps`, `stasher` and `async_stasher`.
"""
