"""The command line (installed as the package harvester_cli)."""
