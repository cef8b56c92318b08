"""Who changed the rows of an outbox: triggers that note each UPDATE and DELETE with the session's application name."""

from __future__ import annotations

from .harvesting import Scene

_INSTALL = """
    CREATE TABLE audit (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, application text, action text, value text);
    CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit (application, action, value)
        SELECT current_setting('application_name'), TG_OP, kafka_value FROM changed;
        RETURN NULL;
    END $$;
    CREATE TRIGGER note_update AFTER UPDATE ON outbox REFERENCING OLD TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION note_change();
    CREATE TRIGGER note_delete AFTER DELETE ON outbox REFERENCING OLD TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION note_change();
"""


class Audit:
    """Notes from its making on. Applications are named by the beginning of their name."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        scene.db.execute(_INSTALL)

    def last(self) -> int:
        """The number of the last note."""
        row = self._scene.db.execute("SELECT coalesce(max(number), 0) FROM audit").fetchone()
        assert row is not None
        return int(row[0])

    def updates(self, application: str, since: int) -> int:
        """How many rows it updated after this note."""
        return len(self._values(application, "UPDATE", since))

    def deleted(self, application: str, since: int) -> list[bytes]:
        """The values of the rows it deleted after this note."""
        return self._values(application, "DELETE", since)

    def _values(self, application: str, action: str, since: int) -> list[bytes]:
        query = "SELECT value FROM audit WHERE application LIKE %s AND action = %s AND number > %s"
        rows = self._scene.db.execute(query, (application + "%", action, since)).fetchall()
        return [row[0].encode() for row in rows]
