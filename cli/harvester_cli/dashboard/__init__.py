"""The live dashboard: `figures` and `render` are pure, `capture` and `live` own the terminal, `plain` does without.

Nothing is imported here, so that `harvester --help` stays quick.
"""
