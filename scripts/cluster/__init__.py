"""`scripts/spark-cluster`: a standalone Spark cluster of separate processes on loopback, from PySpark's own jars."""
