"""The harvested stream as data, on Apache Spark: jobs that read the topics, and the tables they keep.

The jobs have packages of their own: `lake`, `audit`, `drain`, `replay`, `metrics`; each begins in its module `job`,
which wires what the others decide. Transforms are pure functions from DataFrame to DataFrame, with explicit schemas.
Nothing here runs Python on executors: records are touched by expressions of Spark SQL. docs/pipeline.md has the tables.

Importing this package does not import PySpark.
"""
