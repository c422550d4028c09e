"""The contract of generation against vLLM itself, on the CPU: `make test-servers`.

Two servers are started once, as the backend starts its own;
each check then attaches to one of them.
"""

from __future__ import annotations

import os

import pytest
from real_servers import servers_of
from server_contract import AttachedContract, ServerContract

from rlcli.backends._server_http import Endpoint, ServerRefused
from rlcli.testing.contract import Violation

BACKEND = "vllm"
PYTHON = os.environ.get("RLCLI_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs an environment with vLLM: make test-servers"),
    pytest.mark.timeout(1200),
]


class TestContract(AttachedContract):
    name = BACKEND
    mixtures = ()  # the servers were started with a llama

    def restore(self, engine):
        for server in servers_of(engine):
            server.endpoint.post("/wake_up", {}, 60.0)

    def test_a_pause_changes_no_log_prob(self):
        """Its responses are so short in time that all pauses may miss them: then it tries again."""
        for is_last in (False, False, False, False, True):
            try:
                return super().test_a_pause_changes_no_log_prob()
            except Violation as violation:
                if is_last or "no response has tokens from before and after" not in str(violation):
                    raise


class TestServers(ServerContract):
    backend = BACKEND


@pytest.mark.parametrize(
    "path", ["/v1/models", "/collective_rpc", "/pause?mode=keep", "/update_weight_version"]
)
def test_every_request_needs_the_key(ours, path):
    (url, *_) = [server.endpoint.url for server in servers_of(ours)]
    for key in (None, "another"):
        with pytest.raises(ServerRefused, match="401"):
            Endpoint(url, key).post(path, {}, 30.0)
