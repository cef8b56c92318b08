"""Random campaigns: load, faults on a seeded schedule, a recorded history, and a judge over it (scripts/faults)."""
