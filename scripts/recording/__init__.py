"""Plays and checks a session on a terminal, for `scripts/record`."""
