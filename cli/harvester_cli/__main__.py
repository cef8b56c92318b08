"""`python -m harvester_cli`."""

from harvester_cli.main import main

if __name__ == "__main__":
    main()
