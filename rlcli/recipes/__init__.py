"""The root of the recipe search path: every layer, built in or yours, is a YAML file below it."""

from rlcli.project import search_path

__path__ = search_path("recipes")
