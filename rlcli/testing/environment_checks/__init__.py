"""The checks of environments, by subject."""
