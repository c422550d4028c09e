"""Every layer of the search path for recipes, built in or yours, is a YAML file below this door."""

from rlcli.project import search_path

__path__ = search_path("recipes")
