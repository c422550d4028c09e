"""Recipes that rlcli writes: children of others, and those of an older format rewritten."""
