"""A server that speaks the part of vLLM's protocol that rlcli uses (`fake_server`).

Run as a script it replaces `vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_server import FakeServer, HashModel, Sampled, Wish, spans
from faulty_http import Refused

PREFIX = "generate-tokens-"
"""Before the id of a request."""
GREEDY = 1e-10
"""A top_p that leaves only the most likely token."""


class FakeVLLM(FakeServer):
    """`with FakeVLLM(model) as server:` serves at `server.url`."""

    metric_names = {
        "running": "vllm:num_requests_running",
        "queued": "vllm:num_requests_waiting",
        "prompt_tokens": "vllm:prefix_cache_queries_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "preemptions": "vllm:num_preemptions_total",
    }
    load_format = "dummy"
    """With which it reads weights: dummy reads none."""
    logprobs_mode = "processed_logprobs"
    device = "cpu"
    worker_extension_cls = "rlcli_tied_head.TiedHead"

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "/health": lambda _: None,
            "/inference/v1/generate": self._generate,
            "/weight_info": lambda _: {"weight_version": self.label},
            "/server_info": self._server_info,
            "/tokenize": lambda body: {
                "tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids
            },
            "/collective_rpc": self._call_workers,
            "/update_weight_version": self._set_version,
            "/weight_checker": lambda _: {"checksums": self.model.digest()},
            "/reset_prefix_cache": lambda _: self._reset_prefix_cache(),
            "/pause": lambda body: self.pause(aborts=body.get("mode", "abort") == "abort"),
            "/resume": lambda _: self.resume(),
            "/abort_requests": self._abort,
            "/metrics": lambda _: self.metrics(),
            "/sleep": lambda _: self.release({"kv_cache", "weights"}),
            "/wake_up": self._wake_up,
        }

    def _server_info(self, body: dict[str, Any]) -> Any:
        if body.get("config_format") != "json":
            return {"vllm_config": "model='...'"}
        model = {
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "skip_tokenizer_init": self.tokenizer is None,
            **self.info,
        }
        parallel = {
            "tensor_parallel_size": 1,
            "worker_extension_cls": self.worker_extension_cls,
        }
        return {
            "vllm_config": {
                "model_config": model,
                "parallel_config": parallel,
                "device_config": {"device": self.device},
            }
        }

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        self.check_ids(sampling.get("logit_bias", {}))
        is_greedy = sampling["temperature"] == 0
        wish = Wish(
            body["request_id"],
            tuple(body["token_ids"]),
            sampling["max_tokens"],
            sampling.get("seed", 0),
            1.0 if is_greedy else sampling["temperature"],
            GREEDY if is_greedy else 1.0,
            stops=tuple(sampling.get("stop_token_ids", ())),
            compared=tuple(sampling.get("logprob_token_ids", ())),
        )
        return self.respond(wish, lambda sampled: self._answer(wish, sampled))

    def _answer(self, wish: Wish, sampled: Sampled) -> dict[str, Any]:
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [
                    {"token_id": id_, "logprob": logprob_of_id}
                    for id_, logprob_of_id in zip(wish.compared, compared, strict=True)
                ],
            }
            for token, logprob, compared in zip(
                sampled.tokens, sampled.logprobs, sampled.compared, strict=True
            )
        ]
        choice = {
            "index": 0,
            "finish_reason": sampled.finish,
            "token_ids": sampled.tokens,
            "logprobs": {"content": content},
            "weight_versions": spans(sampled.versions) or None,
            "routed_experts": self._experts((*wish.prompt, *sampled.tokens)),
        }
        return {"request_id": f"{PREFIX}{wish.id}", "choices": [choice]}

    def _experts(self, tokens: tuple[int, ...]) -> str | None:
        experts = self.experts_of(tokens)
        if not experts:
            return None
        import base64
        import io

        import numpy

        file = io.BytesIO()
        numpy.save(file, numpy.array(experts, dtype=numpy.uint8), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()

    def _abort(self, body: dict[str, Any]) -> None:
        ids = [id_.removeprefix(PREFIX) for id_ in body.get("request_ids", ())]
        self.abort(ids or None)

    def _wake_up(self, body: dict[str, Any]) -> None:
        contents = {body["tags"]} if "tags" in body else {"kv_cache", "weights"} - self.in_memory
        self.regain(contents)

    # -- weights -----------------------------------------------------------------------------------

    def _call_workers(self, body: dict[str, Any]) -> Any:
        arguments = body["kwargs"]
        match body["method"]:
            case "update_config":
                self.load_format = arguments["overrides"]["load_config"]["load_format"]
            case "reload_weights" if self.load_format == "dummy":
                raise Refused("Model reloading with `dummy` format")
            case "reload_weights":
                self.load(Path(arguments["weights_path"]))
            case method:
                raise Refused(f"no method {method}")
        return {"results": [None]}

    def _set_version(self, body: dict[str, Any]) -> Any:
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def _reset_prefix_cache(self) -> Any:
        self.flush()
        return {"success": True}


def main() -> None:
    """Parses `--config FILE --port PORT`, like `vllm.entrypoints.openai.api_server`."""
    import yaml

    _, file, _, port = sys.argv[1:]
    settings = yaml.safe_load(Path(file).read_text())
    config = json.loads(Path(settings["model"], "config.json").read_text())
    model = HashModel(config["vocab_size"])
    FakeVLLM(model, int(port), settings["api-key"], settings.get("token-s", 0.0)).serve()


if __name__ == "__main__":
    main()
