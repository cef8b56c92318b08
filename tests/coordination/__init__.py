"""Consumers that coordinate through Kafka alone, many of them, under faults."""
