"""Reads topics through Spark's own Kafka source: the configuration's options for Java's client and its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harvester.errors import BrokerUnavailable
from harvester.pipeline.errors import InputMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SAME = ("bootstrap.servers", "security.protocol", "ssl.endpoint.identification.algorithm", "client.id")
_UPPER = "security.protocol"


def for_java(options: Mapping[str, object]) -> dict[str, str]:
    """Addresses, TLS with a CA in a PEM file, and SASL with a password; what has no counterpart is left out.

    A client's own certificate needs one PEM file with key and chain: give it as ssl.keystore.* of the Java client.
    """
    found = {name: str(options[name]) for name in _SAME if options.get(name) not in (None, "")}
    if _UPPER in found:
        found[_UPPER] = found[_UPPER].upper()
    # In librdkafka "none" turns the comparison of host names off, in Java an empty text.
    if found.get("ssl.endpoint.identification.algorithm") == "none":
        found["ssl.endpoint.identification.algorithm"] = ""
    if ca := options.get("ssl.ca.location"):
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(ca)}
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms")
    user = options.get("sasl.username")
    if mechanism and user is not None:
        found["sasl.mechanism"] = str(mechanism)
        module = "scram.Scram" if str(mechanism).startswith("SCRAM") else "plain.Plain"
        found["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module}LoginModule required"
            f" username={_quoted(user)} password={_quoted(options.get('sasl.password', ''))};"
        )
    return found


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


_WAIT = {"default.api.timeout.ms": "30000", "request.timeout.ms": "10000"}
_READING = {
    # Spark waits at the end of each partition for a fetch that finds nothing any more: for 500 ms, if nobody says less.
    "fetch.max.wait.ms": "10",
    # The next fetch is sent when all of the one before is taken, so few large ones wait less than many small ones.
    "max.partition.fetch.bytes": str(4 * 2**20),
    "max.poll.records": "2000",
}


def options(kafka: Mapping[str, str]) -> dict[str, str]:
    """For Spark's Kafka source: committed records with their headers, an error for what was removed meanwhile.

    `kafka` has options as Kafka's Java client names them, and may say otherwise about all but the isolation.
    """
    client = {**_READING, **kafka, "isolation.level": "read_committed"}
    return {f"kafka.{name}": value for name, value in client.items()} | {
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }


def stream(spark: SparkSession, kafka: Mapping[str, str], topics: Iterable[str], most: int) -> DataFrame:
    """Every committed record from the beginning, as schemas.KAFKA; `most` of them in a batch.

    Records that the checkpoint goes on from and Kafka no longer has end the stream: silence would be loss.
    """
    range_ = {"subscribe": ",".join(topics), "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(most)}
    return spark.readStream.format("kafka").options(**options(kafka), **range_).load()


@contextmanager
def admin(spark: SparkSession, kafka: Mapping[str, str], wanted: str) -> Iterator[Any]:
    """Kafka's admin client for Java, by way of py4j; what it raises becomes a BrokerUnavailable that names `wanted`."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm
    properties = jvm.java.util.Properties()
    for name, value in {**_WAIT, **kafka}.items():
        properties.setProperty(name, value)
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
        try:
            yield client
        finally:
            client.close()
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage() or error.java_exception.getClass().getName())
        raise BrokerUnavailable(
            f"no {wanted} from {kafka.get('bootstrap.servers')}: {said.splitlines()[0]}", hint="check the brokers"
        ) from error


def require_topics(spark: SparkSession, kafka: Mapping[str, str], topics: Iterable[str]) -> None:
    """Raises InputMissing, which names the topics that do not exist, or BrokerUnavailable."""
    with admin(spark, kafka, "topics") as client:
        found = set(client.listTopics().names().get())
    if missing := [topic for topic in topics if topic not in found]:
        raise InputMissing(
            f"no topic {', '.join(missing)} at {kafka.get('bootstrap.servers')}",
            hint="a topic comes with the harvester's first record for it, or is made beforehand",
        )
