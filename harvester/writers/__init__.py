"""Stashers where applications are: over SQLAlchemy, Django and asyncpg (docs/writing.md).

Each module imports its library itself and is imported by nothing else here; each comes with the extra of its name.
They share statements and validation with the stashers for psycopg, which are in `harvester.outbox`.
"""
