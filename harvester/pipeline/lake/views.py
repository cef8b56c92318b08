"""The SQL of a lake's views: as of its last batch, or as of a cut."""

from __future__ import annotations

from harvester.pipeline import schemas, tables
from harvester.pipeline.errors import InputMissing
from harvester.pipeline.lake.batch import batch_name
from harvester.pipeline.schemas import Cut
from harvester.pipeline.store import TableStore

LATEST = "latest"


def queries(store: TableStore, as_of: str | None = None) -> dict[str, str]:
    """The query of each view. `as_of`: LATEST, or the number of a cut's batch. Raises InputMissing, TableMismatch."""
    header, at = store.header(), store.at
    if as_of is None:
        return {
            "bronze": schemas.bronze(at, header),
            "deliveries": schemas.deliveries(at("silver"), header),
            "current": schemas.current(at, header, store.properties("current").get(tables.FOLDED)),
            "history": schemas.history(at, header),
        }
    of_cut = schemas.as_of(at, find_cut(store, as_of))
    return {
        "deliveries_as_of": schemas.deliveries(of_cut("silver"), header),
        "current_as_of": schemas.folded(of_cut, header, None),  # the table may have later states
        "history_as_of": schemas.history(of_cut, header),
    }


def find_cut(store: TableStore, as_of: str) -> Cut:
    """The latest cut, or the one of a batch. If it has several, that of the youngest incarnation.

    Raises InputMissing if there is none.
    """
    cuts = store.load(schemas.CUTS_TABLE)
    if as_of != LATEST:
        cuts = cuts.where(cuts["batch"] == batch_name(int(as_of)))
    highest = {row["incarnation"]: row for row in cuts.orderBy("id").collect()}
    since = store.load(schemas.INCARNATIONS_TABLE).collect()
    ages = sorted((row["since"], row["incarnation"]) for row in since)
    names = [name for _, name in ages]
    found = [highest[name] for name in names if name in highest]
    if not found:
        raise InputMissing(
            f"the lake in {store.root} has no cut" + ("" if as_of == LATEST else f" of batch {as_of}"),
            hint="its table `cuts` lists them; there is none before a batch has read all records below a low watermark",
        )
    last = found[-1]
    before = names[: names.index(last["incarnation"])]
    return Cut(last["incarnation"], last["id"], last["batch"], tuple(before))
