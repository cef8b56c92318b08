"""Campaigns of faults against coordinated consumers, and a judge over what each did (scripts/coordination-faults)."""
