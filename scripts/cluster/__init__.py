"""`scripts/spark-cluster`: a Spark standalone cluster of separate processes on loopback, out of PySpark's own jars."""
