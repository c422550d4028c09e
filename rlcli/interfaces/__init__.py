"""Every interface, built in or yours, is `rlcli.interfaces.<file name>`."""

from rlcli.project import search_path

__path__ = search_path("interfaces")
