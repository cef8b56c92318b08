"""The live dashboard: `figures`, `lines`, `render` and `watching` are pure, `terminal` and `live` do the drawing.

Nothing is imported here, so that `harvester --help` stays quick.
"""
