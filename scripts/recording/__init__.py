"""A session on a terminal, played and checked by `scripts/record`."""
