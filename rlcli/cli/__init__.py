"""The command line: one file per verb, each of which imports what it needs when it is called."""
