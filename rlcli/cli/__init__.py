"""The command line: one file per verb, each importing what it needs when it is called."""
