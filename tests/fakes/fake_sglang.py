"""A server that speaks the part of SGLang's protocol that rlcli uses (`fake_server`).

Run as a script it replaces `sglang.launch_server`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_server import FakeServer, HashModel, Sampled, Wish, spans
from faulty_http import Refused


class FakeSGLang(FakeServer):
    """`with FakeSGLang(model) as server:` serves at `server.url`."""

    metric_names = {
        "running": "sglang:num_running_reqs",
        "queued": "sglang:num_queue_reqs",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
        "preemptions": "sglang:num_retracted_requests_total",
    }
    preferred: Mapping[str, Any] | None = None
    """Its own preferred sampling settings."""
    _is_open = False
    """Whether an update in a process group is under way."""

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "/ready": lambda _: {},
            "/health_generate": lambda _: {},
            "/generate": self._generate,
            "/model_info": lambda _: {
                "weight_version": self.label,
                "preferred_sampling_params": self.preferred,
            },
            "/server_info": lambda _: {
                "version": "0.5.23",
                "tp_size": 1,
                "skip_tokenizer_init": self.tokenizer is None,
                **self.info,
            },
            "/tokenize": lambda body: {
                "tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids
            },
            "/update_weights_from_disk": self._from_disk,
            "/init_weights_update_group": self._join,
            "/begin_weight_update": lambda _: self._session(True),
            "/end_weight_update": lambda _: self._session(False),
            "/update_weights_from_distributed": self._distributed,
            "/destroy_weights_update_group": self._leave,
            "/weights_checker": lambda _: {
                "success": True,
                "per_engine_checksum": self.model.digest(),
            },
            "/pause_generation": lambda body: self.pause(aborts=body["mode"] == "abort"),
            "/continue_generation": lambda _: self.resume(),
            "/abort_request": lambda body: self.abort(
                None if body.get("abort_all") else [body["rid"]]
            ),
            "/metrics": lambda _: self.metrics(),
            "/flush_cache": lambda _: self.flush(),
            "/release_memory_occupation": lambda body: self.release(set(body["tags"])),
            "/resume_memory_occupation": lambda body: self.regain(set(body["tags"])),
        }

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        self.check_ids(sampling.get("logit_bias", {}))
        top_k = sampling.get("top_k", -1)
        wish = Wish(
            body["rid"],
            tuple(body["input_ids"]),
            sampling["max_new_tokens"],
            sampling.get("sampling_seed", 0),
            1.0 if top_k == 1 else sampling["temperature"],  # its greedy mode has none
            sampling.get("top_p", 1.0),
            top_k,
            tuple(sampling.get("stop_token_ids", ())),
            tuple(body.get("token_ids_logprob", ())),
        )
        reports_experts = bool(body.get("return_routed_experts"))
        return self.respond(wish, lambda sampled: self._answer(wish, sampled, reports_experts))

    def _answer(self, wish: Wish, sampled: Sampled, reports_experts: bool) -> dict[str, Any]:
        scores = zip(sampled.logprobs, sampled.tokens, strict=True)
        compared = [zip(at, wish.compared, strict=True) for at in sampled.compared]
        meta = {
            "id": wish.id,
            "finish_reason": {"type": sampled.finish},
            "prompt_tokens": len(wish.prompt),
            "completion_tokens": len(sampled.tokens),
            "output_token_logprobs": [[*score, None] for score in scores],
            "output_token_ids_logprobs": [[[*score, None] for score in at] for at in compared],
            "weight_version": self.label,
            "weight_versions": spans(sampled.versions),
        }
        if reports_experts:
            meta["routed_experts"] = self._experts((*wish.prompt, *sampled.tokens))
        return {"text": "", "output_ids": sampled.tokens, "meta_info": meta}

    def _experts(self, tokens: tuple[int, ...]) -> str | None:
        experts = self.experts_of(tokens)
        if not experts:
            return None
        import base64

        import numpy

        return base64.b64encode(numpy.array(experts, dtype="<i4").tobytes()).decode()

    # -- weights -----------------------------------------------------------------------------------

    def _from_disk(self, body: dict[str, Any]) -> Any:
        # with the weights the server was started with
        if body.get("load_format", "dummy") == "dummy":
            raise Refused("Failed to get model loader")
        self.load(Path(body["model_path"]))
        return self._updated(body)

    def _join(self, body: dict[str, Any]) -> Any:
        self.model.join(
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            body["group_name"],
        )
        return {"success": True}

    def _leave(self, body: dict[str, Any]) -> Any:
        self.model.leave(body["group_name"])
        return {"success": True}

    def _session(self, begins: bool) -> Any:
        if self._is_open == begins:
            raise Refused("already open" if begins else "not open")
        self._is_open = begins
        if not begins:
            self.model.take_received()
        return {"success": True}

    def _distributed(self, body: dict[str, Any]) -> Any:
        if not self._is_open:
            raise Refused("call begin_weight_update first")
        if "weights" not in self.in_memory:
            raise Refused("the memory of the weights is given back")
        self.model.receive(body["group_name"], body["names"], body["dtypes"], body["shapes"])
        return self._updated(body)

    def _updated(self, body: dict[str, Any]) -> Any:
        self.label = body.get("weight_version") or self.label
        if body.get("flush_cache", True):
            self.flush()
        return {"success": True}


def _meet(settings: Mapping[str, Any]) -> list[socket.socket]:
    """Connect with the server's processes on other nodes. Those without an endpoint stay here for
    as long as they run.

    No process notices that another one has died, as if it waited in a collective operation.
    """
    host, _, port = settings["dist-init-addr"].partition(":")
    if settings["node-rank"] == 0:
        with socket.create_server((host, int(port))) as meeting:
            return [meeting.accept()[0] for _ in range(settings["nnodes"] - 1)]
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port))),
        ):
            threading.Event().wait()
        time.sleep(0.05)


def main() -> None:
    """Parses `--config FILE --port PORT`, like `sglang.launch_server`."""
    import yaml

    _, file, _, port = sys.argv[1:]
    settings = yaml.safe_load(Path(file).read_text())
    peers = _meet(settings) if settings.get("nnodes", 1) > 1 else []
    model = HashModel(
        json.loads(Path(settings["model-path"], "config.json").read_text())["vocab_size"]
    )
    FakeSGLang(model, int(port), settings["api-key"], settings.get("token-s", 0.0)).serve()
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
