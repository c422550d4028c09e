"""From files and the command line to one tree: layers, overrides, references;
every value keeps its place."""
