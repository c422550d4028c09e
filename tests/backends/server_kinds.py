"""The kinds of servers that the same tests are run with: their fakes, and the paths of requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fake_server import FakeServer
from fake_sglang import FakeSGLang
from fake_vllm import FakeVLLM

from rlcli.backends._server_dialect import Dialect
from rlcli.backends._sglang_dialect import SGLangDialect
from rlcli.backends._vllm_dialect import VLLMDialect

TOKENS = [3, 4, 5, 1]
VERSIONS = [
    {"version": "run-1", "start": 0, "end": 2},
    {"version": "run-2", "start": 2, "end": 4},
]


@dataclass(frozen=True)
class Kind:
    name: str
    dialect: Dialect
    fake: type[FakeServer]
    load: str
    """Path of the last request of an update from disk."""
    info: str
    """Path of the request for what the server says about itself."""
    label: str
    """Path of the request for the version of its weights."""
    answer: Mapping[str, Any]
    """An answer to a request with the id `request` for a response."""
    facts: Mapping[str, Any]
    """Path → answers to the questions about itself."""

    def __str__(self) -> str:
        return self.name

    @property
    def generate(self) -> str:
        return self.dialect.GENERATE


SGLANG = Kind(
    "sglang",
    SGLangDialect(),
    FakeSGLang,
    load="/update_weights_from_disk",
    info="/server_info",
    label="/model_info",
    answer={
        "text": "",
        "output_ids": TOKENS,
        "meta_info": {
            "id": "request",
            "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "run-1",
            "weight_versions": VERSIONS,
            "output_token_logprobs": [[-0.5, token, None] for token in TOKENS],
            "output_token_ids_logprobs": [
                [[-1.0 - token / 10, token, None] for token in range(11)]
            ],
        },
    },
    facts={"/server_info": {"tp_size": 1}, "/model_info": {"weight_version": "run-1"}},
)
VLLM = Kind(
    "vllm",
    VLLMDialect(),
    FakeVLLM,
    load="/update_weight_version",
    info="/server_info",
    label="/weight_info",
    answer={
        "request_id": "generate-tokens-request",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "stop_reason": 1,
                "token_ids": TOKENS,
                "weight_versions": VERSIONS,
                "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in TOKENS]},
            }
        ],
    },
    facts={
        "/server_info?config_format=json": {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "parallel_config": {"tensor_parallel_size": 1},
                "device_config": {"device": "cuda"},
            }
        }
    },
)
KINDS = (SGLANG, VLLM)
