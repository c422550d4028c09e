"""Every backend, built in or yours, is `rlcli.backends.<file name>`."""

from rlcli.project import search_path

__path__ = search_path("backends")
