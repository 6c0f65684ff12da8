"""``python -m l0prune``: the command line, for launchers that start modules."""

from l0prune.cli.app import main

if __name__ == "__main__":
    main()
