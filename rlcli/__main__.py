"""`python -m rlcli` is the `rlcli` command."""

from rlcli.cli.main import main

if __name__ == "__main__":
    main()
