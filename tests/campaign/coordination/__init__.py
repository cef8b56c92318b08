"""Coordinated consumers, struck by faults; the judge sees what each of them noted."""
