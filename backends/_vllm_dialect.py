"""vLLM's endpoints and names, from 0.32 on; many are those of its development mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rlcli.api.config import GenerationHyperparameters
from rlcli.errors import ModelError

from ._server_dialect import Call, Dialect, ResponseRequest, ServerFacts, ServerReply, WeightUpdate
from ._server_http import Endpoint, ServerRefused

PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request."""
EXTENSIONS = Path(__file__).with_name("_vllm_path")
LOGPROBS_MODE = "processed_logprobs"
"""Log-probs after the temperature. It also applies what removes tokens from the distribution."""
TIED_HEAD = "rlcli_tied_head.TiedHead"
"""A part of vLLM's workers, in `_vllm_path`."""
UNCHANGED = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent with each request: otherwise the model's generation_config.json may set them."""


class VLLMDialect(Dialect):
    NAME: ClassVar[str] = "vLLM"
    OLDEST: ClassVar[str] = "vLLM 0.32"
    MODULE: ClassVar[str] = "vllm.entrypoints.openai.api_server"
    READY: ClassVar[str] = "/health"
    ALIVE: ClassVar[str] = "/health"
    GENERATE: ClassVar[str] = "/inference/v1/generate"
    METRICS: ClassVar[Mapping[str, str]] = {
        "running": "vllm:num_requests_running",
        "queued": "vllm:num_requests_waiting",
        "prompt_tokens": "vllm:prefix_cache_queries_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "preemptions": "vllm:num_preemptions_total",
    }
    PAUSING_ABORTS: ClassVar[bool] = True

    def settings(self, model: Path, tp: int, key: str) -> dict[str, Any]:
        return {
            "model": str(model),
            "load-format": "dummy",
            "skip-tokenizer-init": True,
            "host": "127.0.0.1",
            "api-key": key,
            "tensor-parallel-size": tp,
            "logprobs-mode": LOGPROBS_MODE,
            "generation-config": "vllm",
            "enable-scale-out": True,
            "middleware": ["rlcli_key_guard.KeyGuard"],
            "worker-extension-cls": TIED_HEAD,
        }

    def variables(self) -> dict[str, str]:
        return {
            **super().variables(),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(EXTENSIONS),
        }

    # -- responses ---------------------------------------------------------------------------------

    def sampling_parameters(
        self, gconfig: GenerationHyperparameters, ends: Sequence[int]
    ) -> dict[str, Any]:
        is_greedy = gconfig.greedy or gconfig.top_k == 1
        unsuitable = {
            "min_new_tokens": (gconfig.min_new_tokens, 0),
            "top_p": (gconfig.top_p, 1),
            "top_k": (0 if is_greedy else gconfig.top_k, 0),
            "temperature": (gconfig.temperature if is_greedy else 1, 1),
        }
        for name, (value, suitable) in unsuitable.items():
            if value != suitable:
                reason = "greedily, and reports them without the temperature"
                message = (
                    f"a vllm server reports different log-probs with {name} {value:g}: it computes "
                    f"them {reason if name == 'temperature' else 'after it has removed tokens'}"
                )
                hint = f"set generation.{name}={suitable}"
                raise ModelError(message, hint=hint, code="F93")
        return {
            **UNCHANGED,
            "temperature": 0.0 if is_greedy else gconfig.temperature,
            "stop_token_ids": list(ends),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        }

    def body(self, request: ResponseRequest) -> dict[str, Any]:
        parameters = {
            **request.parameters,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
        }
        return _request(request.id, request.prompt, parameters)

    def reply(self, raw: Any) -> ServerReply:
        (choice,) = raw["choices"]
        logged = [(entry["token_id"], entry["logprob"]) for entry in _content(choice)]
        return ServerReply(
            raw["request_id"].removeprefix(PREFIX),
            choice["token_ids"],
            logged,
            choice["finish_reason"],
            choice["weight_versions"] or (),
            choice.get("routed_experts"),
        )

    # -- pauses and memory -------------------------------------------------------------------------

    def pause(self, mode: str) -> Call:
        return f"/pause?mode={'keep' if mode == 'in_place' else 'abort'}", {}

    def resume(self) -> Call:
        return "/resume", {}

    def recover(self) -> Sequence[Call]:
        return [("/wake_up", {}), self.resume()]  # or has left asleep

    def abort(self, id_: str | None) -> Call:
        return "/abort_requests", {} if id_ is None else {"request_ids": [PREFIX + id_]}

    def release(self) -> Sequence[Call]:
        return [("/sleep?level=2", {})]

    def regain(self, content: str) -> Call:
        return f"/wake_up?tags={content}", {}

    # -- weights -----------------------------------------------------------------------------------

    def load(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        # a server started without weights would not load any
        overrides = {"load_config": {"load_format": "auto"}}
        _call_workers(endpoint, "update_config", {"overrides": overrides}, seconds)
        _call_workers(endpoint, "reload_weights", {"weights_path": str(update.folder)}, seconds)
        with suppress(ServerRefused):  # one on a GPU that somebody else has started lacks it
            _call_workers(endpoint, "renew_tied_head", {}, seconds)
        if update.flushes:
            answer = endpoint.post("/reset_prefix_cache", {}, seconds)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise ServerRefused(200, "the prefix cache was not reset")
        endpoint.post("/update_weight_version", {"new_version": update.label}, seconds)

    def label(self, endpoint: Endpoint, seconds: float) -> Any:
        info = endpoint.get("/weight_info", seconds)
        return info.get("weight_version") if isinstance(info, dict) else None

    def digest(self, endpoint: Endpoint, seconds: float) -> Any:
        answer = endpoint.post("/weight_checker", {"action": "checksum"}, seconds)
        return answer.get("checksums") if isinstance(answer, dict) else None

    # -- what it says about itself -----------------------------------------------------------------

    def facts(self, endpoint: Endpoint, seconds: float) -> ServerFacts:
        config = endpoint.get("/server_info?config_format=json", seconds)["vllm_config"]
        model = config["model_config"]
        return ServerFacts(
            config["parallel_config"].get("tensor_parallel_size"),
            str(model.get("dtype")).removeprefix("torch."),
            has_tokenizer=not model.get("skip_tokenizer_init"),
            unsuitable=_unsuitable(config),
        )

    def tokens_request(self, texts: Sequence[str]) -> Sequence[Call]:
        return [("/tokenize", {"prompt": text, "add_special_tokens": False}) for text in texts]

    def read_tokens(self, answers: Sequence[Any]) -> list[list[int]]:
        return [answer["tokens"] for answer in answers]

    def bias_body(self, id_: int, request_id: str) -> dict[str, Any]:
        parameters = {"max_tokens": 1, "temperature": 1.0, "logit_bias": {str(id_): 0.0}}
        return _request(request_id, [0], parameters)

    def logprobs_body(
        self, ids: Sequence[int], temperature: float, request_id: str
    ) -> dict[str, Any]:
        # the sampled token takes the place of the last id if it is not one of them
        spare = [id_ for id_ in range(max(ids)) if id_ not in ids][:1]
        parameters = {
            **UNCHANGED,
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": len(ids) + len(spare),
            "logprob_token_ids": [*ids, *spare],
        }
        return _request(request_id, [0], parameters)

    def read_logprobs(self, raw: Any) -> tuple[Any, dict[int, Any]]:
        (choice,) = raw["choices"]
        (position,) = _content(choice)
        logged = {entry["token_id"]: entry["logprob"] for entry in position["top_logprobs"]}
        return raw["request_id"].removeprefix(PREFIX), logged


def _unsuitable(config: Any) -> tuple[str, str] | None:
    """What a server's configuration makes impossible, and how to start it instead."""
    mode = config["model_config"].get("logprobs_mode")
    if mode != LOGPROBS_MODE:
        return (
            f"reports {mode}: those of a distribution other than the one that it samples from",
            f"start it with --logprobs-mode {LOGPROBS_MODE}",
        )
    is_on_cpu = config["device_config"].get("device") == "cpu"
    if is_on_cpu and config["parallel_config"].get("worker_extension_cls") != TIED_HEAD:
        return (
            "computes on a CPU, where a head that shares the embeddings' matrix keeps its old "
            "weights when new ones are loaded",
            f"start it with --worker-extension-cls {TIED_HEAD}, and with the folder "
            "backends/_vllm_path in its PYTHONPATH",
        )
    return None


def _request(id_: str, prompt: Sequence[int], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": id_, "token_ids": list(prompt), "sampling_params": parameters}


def _content(choice: Any) -> list[Any]:
    """The log-probs of each token; none for a response that was aborted before its first."""
    logprobs = choice["logprobs"]
    return (logprobs["content"] or []) if logprobs is not None else []


def _call_workers(
    endpoint: Endpoint, method: str, arguments: dict[str, Any], seconds: float
) -> None:
    endpoint.post("/collective_rpc", {"method": method, "kwargs": arguments}, seconds)
