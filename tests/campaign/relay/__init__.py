"""Harvesters under load, struck by faults; the checker sees the database, the topics and their logs."""
