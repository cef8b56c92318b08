"""Whether a table that is there can be written to."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql.types import ArrayType, IntegerType, LongType, MapType, StringType, StructField, StructType

from harvester.pipeline.schemas import BRONZE, TABLES, Addition, Table, add_columns, create, differences
from harvester.pipeline.source import for_java


def struct(**fields: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])  # type: ignore[arg-type]


def test_every_table_fits_itself() -> None:
    for table in TABLES:
        assert differences(table.schema, table.schema) == ([], [])
        assert set(table.partitioned_by) <= set(table.schema.names)


def test_the_page_has_every_table_and_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    for table in TABLES:
        assert f"\n| `{table.name}` |" in page
        assert [name for name in table.schema.names if f"`{name}`" not in page] == []


def test_new_columns_are_added_also_within_structs() -> None:
    found = struct(id=LongType(), data=struct(total=IntegerType()))
    expected = struct(id=LongType(), data=struct(note=StringType(), total=IntegerType()), key=StringType())
    assert differences(found, expected) == (
        [Addition(("data", "note"), StringType()), Addition(("key",), StringType())],
        [],
    )


def test_names_are_quoted_wherever_they_stand() -> None:
    inner = struct(**{"order-id": IntegerType(), "a`b": ArrayType(struct(**{"c.d": StringType()}))})
    kind = "struct<`order-id`: int, `a``b`: array<struct<`c.d`: string>>>"
    made = create("a.x", "delta", Table("x", struct(**{"my data": inner})), {})
    assert made.startswith(f"CREATE TABLE IF NOT EXISTS a.x (`my data` {kind}) USING delta")
    added = Addition(("data", "of-key"), MapType(StringType(), inner))
    assert add_columns("/lake/x", [added]).endswith(f"ADD COLUMNS (`data`.`of-key` map<string, {kind}>)")


def test_another_type_is_a_problem_and_columns_of_others_are_none() -> None:
    found = struct(id=IntegerType(), data=struct(total=StringType()), mine=StringType())
    expected = struct(id=LongType(), data=struct(total=IntegerType()))
    assert differences(found, expected) == ([], ["id is int, not bigint", "data.total is string, not int"])
    strict = StructType([*BRONZE, StructField("mine", StringType(), nullable=False)])
    assert differences(strict, BRONZE) == ([], ["mine accepts no NULL"])


def test_options_of_kafka_in_the_words_of_the_java_client() -> None:
    plain = {"bootstrap.servers": "a:1", "broker.address.family": "v4", "security.protocol": "sasl_ssl"}
    assert for_java(plain) == {"bootstrap.servers": "a:1", "security.protocol": "SASL_SSL"}
    secured = {
        **plain, "ssl.ca.location": "/ca.pem", "ssl.endpoint.identification.algorithm": "none",
        "sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "we", "sasl.password": 'a"b\\c',
    }  # fmt: skip
    assert for_java(secured) == {
        "bootstrap.servers": "a:1",
        "security.protocol": "SASL_SSL",
        "ssl.endpoint.identification.algorithm": "",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required"
        ' username="we" password="a\\"b\\\\c";',
    }
