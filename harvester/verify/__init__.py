"""Load with ground truth, and the verdict on what a harvester made of it.

`load` (pure) plans transactions from a seed; `pump` writes them, counting each key in a side table within the same
transactions (`truth`). `reader` reads topics to their end into a `history`; `verdict` (pure) compares it with the
counts; `check` is all of that together. `wire` is the form of a pumped record, known to both sides.
"""
