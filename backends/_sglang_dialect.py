"""SGLang's endpoints and names, from 0.5.21 on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlcli.api.config import GenerationHyperparameters
from rlcli.errors import ModelError

from ._server_dialect import (
    Call,
    Dialect,
    ResponseRequest,
    ServerFacts,
    ServerReply,
    WeightUpdate,
)
from ._server_http import Endpoint, ServerRefused

ALMOST_NOTHING = 1e-10
"""A top_p that leaves only the most likely token."""
SENT = frozenset(
    {"temperature", "top_p", "top_k", "stop_token_ids", "max_new_tokens", "sampling_seed"}
)
"""The sampling parameters that every request has."""


class SGLangDialect(Dialect):
    """Log-probs are those of the whole distribution at the temperature, unless something is removed
    from the distribution before they are computed: so neither bans nor biases are sent."""

    NAME: ClassVar[str] = "SGLang"
    OLDEST: ClassVar[str] = "SGLang 0.5.21"
    MODULE: ClassVar[str] = "sglang.launch_server"
    READY: ClassVar[str] = "/ready"
    ALIVE: ClassVar[str] = "/health_generate"
    GENERATE: ClassVar[str] = "/generate"
    METRICS: ClassVar[Mapping[str, str]] = {
        "running": "sglang:num_running_reqs",
        "queued": "sglang:num_queue_reqs",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
        "preemptions": "sglang:num_retracted_requests_total",
    }

    def settings(self, model: Path, tp: int, key: str) -> dict[str, Any]:
        return {
            "model-path": str(model),
            "load-format": "dummy",
            "skip-tokenizer-init": True,
            "host": "127.0.0.1",
            "api-key": key,
            "tp-size": tp,
            "enable-metrics": True,
        }

    def settings_over_nodes(self, nodes: int, node: int, meeting: str) -> dict[str, Any]:
        return {"nnodes": nodes, "dist-init-addr": meeting, "node-rank": node}

    # -- responses ---------------------------------------------------------------------------------

    def sampling_parameters(
        self, gconfig: GenerationHyperparameters, ends: Sequence[int]
    ) -> dict[str, Any]:
        if gconfig.min_new_tokens:
            message = (
                "an sglang server reports different log-probs while min_new_tokens keeps a "
                "response from ending"
            )
            raise ModelError(message, hint="set generation.min_new_tokens=0", code="F93")
        top_k, top_p = gconfig.top_k or -1, gconfig.top_p
        if gconfig.greedy or top_k == 1:  # its own greedy mode omits the temperature from log-probs
            top_k, top_p = -1, ALMOST_NOTHING
        return {
            "temperature": gconfig.temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop_token_ids": list(ends),
        }

    def body(self, request: ResponseRequest) -> dict[str, Any]:
        parameters = {
            **request.parameters,
            "max_new_tokens": request.max_new_tokens,
            "sampling_seed": request.seed,
        }
        return {
            "input_ids": list(request.prompt),
            "rid": request.id,
            "sampling_params": parameters,
            "return_logprob": True,
            "return_routed_experts": request.bytes_of_experts > 0,
        }

    def reply(self, raw: Any) -> ServerReply:
        meta, tokens = raw["meta_info"], raw["output_ids"]
        versions = meta.get("weight_versions")
        if versions is None:  # older servers only report the last version
            versions = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        logged = [(entry[1], entry[0]) for entry in meta["output_token_logprobs"]]
        return ServerReply(
            meta["id"],
            tokens,
            logged,
            meta["finish_reason"]["type"],
            versions,
            meta.get("routed_experts"),
        )

    # -- pauses and memory -------------------------------------------------------------------------

    def pause(self, mode: str) -> Call:
        return "/pause_generation", {"mode": mode}

    def resume(self) -> Call:
        return "/continue_generation", {}

    def abort(self, id_: str | None) -> Call:
        return "/abort_request", {"abort_all": True} if id_ is None else {"rid": id_}

    def release(self) -> Sequence[Call]:
        return [
            ("/release_memory_occupation", {"tags": [content]})
            for content in ("kv_cache", "weights")
        ]

    def regain(self, content: str) -> Call:
        return "/resume_memory_occupation", {"tags": [content]}

    # -- weights -----------------------------------------------------------------------------------

    def load(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        body = {
            "model_path": str(update.folder),
            "weight_version": update.label,
            "flush_cache": update.flushes,
            "load_format": "auto",  # a server started without weights would not load any
        }
        endpoint.post("/update_weights_from_disk", body, seconds)

    def send(
        self, endpoint: Endpoint, update: WeightUpdate, ranks: int, address: str, seconds: float
    ) -> None:
        from ._sglang_group import by_process_group

        by_process_group(endpoint, update, ranks, address, seconds)

    def label(self, endpoint: Endpoint, seconds: float) -> Any:
        info = endpoint.get("/model_info", seconds)
        return info.get("weight_version") if isinstance(info, dict) else None

    def digest(self, endpoint: Endpoint, seconds: float) -> Any:
        try:
            answer = endpoint.post("/weights_checker", {"action": "checksum"}, seconds)
        except ServerRefused:  # an older version
            return None
        return answer.get("per_engine_checksum") if isinstance(answer, dict) else None

    # -- what it says about itself -----------------------------------------------------------------

    def facts(self, endpoint: Endpoint, seconds: float) -> ServerFacts:
        info = endpoint.get("/server_info", seconds)
        model = endpoint.get("/model_info", seconds)
        if not isinstance(info, dict) or not isinstance(model, dict):
            raise ValueError
        preferred = model.get("preferred_sampling_params")
        names = preferred if isinstance(preferred, dict) else [str(preferred)]
        return ServerFacts(
            info.get("tp_size"),
            info.get("dtype"),
            has_tokenizer=not info.get("skip_tokenizer_init"),
            own_sampling=sorted(set(names) - SENT) if preferred else (),
        )

    def tokens_request(self, texts: Sequence[str]) -> Sequence[Call]:
        return [("/tokenize", {"prompt": list(texts), "add_special_tokens": False})]

    def read_tokens(self, answers: Sequence[Any]) -> list[list[int]]:
        (answer,) = answers
        return list(answer["tokens"])

    def bias_body(self, id_: int, request_id: str) -> dict[str, Any]:
        parameters = {"max_new_tokens": 1, "temperature": 1.0, "logit_bias": {str(id_): 0.0}}
        return {"input_ids": [0], "rid": request_id, "sampling_params": parameters}

    def logprobs_body(
        self, ids: Sequence[int], temperature: float, request_id: str
    ) -> dict[str, Any]:
        return {
            "input_ids": [0],
            "rid": request_id,
            "return_logprob": True,
            "token_ids_logprob": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
        }

    def read_logprobs(self, raw: Any) -> tuple[Any, dict[int, Any]]:
        meta = raw["meta_info"]
        (logged,) = meta["output_token_ids_logprobs"]
        return meta["id"], {token: logprob for logprob, token, *_ in logged}
