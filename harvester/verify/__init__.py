"""Writes a load whose outcome is known, and judges what a harvester made of it.

`load` plans transactions from a seed; `pump` writes them and counts the records of each key in a side table, within the
same transactions. `reader` reads topics to their end into a history. `verdict` (pure) compares it with the counts, key
by key; `sequences` (pure) looks for missing records in the topics alone. `check` combines all of it.
"""
