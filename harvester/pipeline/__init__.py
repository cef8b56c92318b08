"""Apache Spark jobs that store, audit, fill, replay and measure harvested topics, and the tables they maintain.

Each job is a package: `lake`, `audit`, `drain`, `replay`, `metrics`. Its module `job` is the entry point, which
connects the decisions of the others. Transforms are pure functions from DataFrame to DataFrame with explicit schemas.
No Python runs on executors: only Spark SQL expressions process records. docs/pipeline.md describes the tables.

Importing this package does not import PySpark.
"""
