"""The function that the page on large values gives to those who read a lake: it is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harvester.claim_check.reference import StoreSettings, refer, replaced
from harvester.claim_check.stores import DirectoryStore
from harvester.record import KafkaRecord
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

PAGE = Path(__file__).parents[2] / "docs" / "large-values.md"
STORE = "s3://shop-values/outbox"


def test_a_query_gets_the_values_that_were_put_away(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path
) -> None:
    settings = StoreSettings(f"file://{tmp_path / 'values'}")
    (tmp_path / "values").mkdir()
    large = KafkaRecord(1, b"a", "orders", b"x" * 100_000, [], -1, 0)
    reference = refer(large)
    store = DirectoryStore(settings)
    store.put(reference.name, large.value or b"")
    short = replaced(large, reference, store.url)
    topic, sent = make_topic(1, KEPT), Sent(1, b"a", short.value, more=tuple(short.headers))
    Writer(servers.bootstrap).send(topic, [sent, Sent(2, b"a", b"own")])
    lake = Lake(spark, tmp_path / "lake", servers.bootstrap)
    lake.folds = False
    lake.once(topic)

    (code,) = re.findall(r"```python\n(from pyspark.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert STORE in code
    given: dict[str, Any] = {}
    exec(compile(code.replace(STORE, settings.url), str(PAGE), "exec"), given)
    rows = lake.table("silver").withColumn("value", given["whole"]("value", "headers")).select("id", "value").collect()
    assert {row.id: bytes(row.value) for row in rows} == {1: large.value, 2: b"own"}
