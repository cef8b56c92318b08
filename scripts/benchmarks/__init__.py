"""The scenarios of scripts/bench: one module for each group of them; what they share begins with an underscore."""
