"""The token with which an environment asks its server."""

from __future__ import annotations

import os

from rlcli.api.environment import EnvironmentFailure
from rlcli.api.network import demand_private_way


def check_way_of_token(url: str, variable: str | None) -> None:
    """Raises ValueError if a token in `variable` would be sent to another machine in plain text."""
    if variable is not None:
        demand_private_way(url, "token")


def token_headers(variable: str | None) -> dict[str, str]:
    """The headers of a request with the token in a variable of the environment; none if no variable
    is named. Raises EnvironmentFailure, which does not contain the token, if it cannot be sent."""
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise EnvironmentFailure(f"there is no environment variable {variable}")
    if not (token.isascii() and token.isprintable()):
        problem = "has characters, such as the end of a line, that a header cannot hold"
        raise EnvironmentFailure(f"the environment variable {variable} {problem}")
    return {"Authorization": f"Bearer {token}"}
