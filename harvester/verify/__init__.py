"""Load with ground truth, and the verdict on what a harvester made of it.

`load` (pure) plans transactions from a seed; `pump` writes them, counting each key in a side table within the same
transactions (`truth`); `reader` reads topics to their end; `verdict` (pure) compares the two; `check` puts them
together. `wire` is the form of a pumped record, known to both sides.
"""
