"""The harvested stream as data, on Apache Spark: jobs that read the topics, and the tables they keep.

Transforms are pure functions from DataFrame to DataFrame, with explicit schemas and a closing select; jobs only wire.
Nothing here runs Python on executors: records are touched by expressions of Spark SQL. docs/pipeline.md has the tables.

The jobs have packages of their own: `lake`, `audit`, `drain`, `replay`, `metrics`; in each, `job` is where it begins.
What they share: `versions` and `connectors` (what belongs to the installed PySpark), `session` (thin), `source` and
`kafka_options` (Kafka), `jdbc` (PostgreSQL), `schemas` (every table's columns), `origin_columns` (Kafka's rows →
bronze) by `byte_columns`, `tables` and `merging` (Delta), `checkpoint` and `offsets` (which records a batch has),
`streaming` (a checkpoint claimed, a stream begun), `files`.

Importing this package does not import PySpark.
"""
