"""Every dataset, built in or yours, is `rlcli.datasets.<file name>`."""

from rlcli.project import search_path

__path__ = search_path("datasets")
