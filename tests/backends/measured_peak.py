"""Run as a script: the peaks of a process's memory in phases of an engine, as JSON.
Not a test itself.

    measured_peak.py '[{"ranks": 2, "dimension": "dp", "config": {...}, "dtype": "float32",
                        "runs": [{"phase": "update", ...}]}]'

prints, for each layout, the peaks of its runs on the first of its ranks. These are forks of this
process.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch._dynamo
import transformers.models.llama.modeling_llama  # noqa: F401

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.api.model_source import open_source
from rlcli.registry import make_backend
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks


class Tokenizer:
    def __init__(self, size: int):
        self.eos_token_id, self.pad_token_id, self._size = size + 1, 0, size

    def __len__(self) -> int:
        return self._size


def resident(kind: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the peak), in bytes."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)
    )
    return int(line.split()[1]) * 1024


def peak_of(work) -> tuple[int, int]:
    """(bytes in use before, peak while working) of this process."""
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return before, resident("VmHWM")


def sequences(count: int, length: int, vocabulary: int) -> SequenceSample:
    return SequenceSample.from_default(
        ids=list(range(count)),
        seqlens=[length] * count,
        data={"packed_input_ids": torch.randint(3, vocabulary, (count * length,))},
    )


def build(asked: dict, mesh) -> Model:
    tokenizer = Tokenizer(asked["config"]["vocab_size"])
    source = open_source(asked["config"], head=asked.get("head", "lm"), tokenizer=None, seed=0)
    model = Model(
        name="actor",
        module=None,
        tokenizer=tokenizer,
        device=torch.device(asked.get("device", "cpu")),
        source=source,
        device_mesh=mesh,
    )
    args = {"dtype": asked["dtype"], **asked.get("args", {})}
    backend = make_backend(ModelBackendAbstraction(asked["backend"], args))
    return backend.initialize(
        model, FinetuneSpec(total_train_steps=10, dataset_size=8, train_batch_size=1)
    )


def prepared(asked: dict, mesh=None):
    """The work of a phase, after what an engine does only the first time."""
    model = build(asked, mesh)
    engine = model.module
    count, length = asked["count"], asked["length"]
    vocabulary = asked["config"]["vocab_size"]
    batch = sequences(count, length, vocabulary)
    value = asked.get("head", "lm") == "value"

    def score(output, _):
        return output.values if value else output.logprobs

    def update():
        spec = MicroBatchSpec(n_mbs=asked.get("micro_batches", 1))
        engine.train_batch(
            batch, lambda output, mb: -score(output, mb).sum(), lambda mb: 1.0, mb_spec=spec
        )

    def inference(batch=batch, count=count, length=length):
        shorter = None if value else [[length - 1]] * count
        engine.forward(batch, MicroBatchSpec(), post_hook=score, output_seqlens=shorter)

    def generate():
        prompts = SequenceSample.from_default(
            ids=list(range(count)),
            seqlens=[length] * count,
            data={"packed_prompts": batch.data["packed_input_ids"]},
        )
        settings = GenerationHyperparameters(
            max_new_tokens=asked["new"],
            min_new_tokens=asked["new"],
            max_concurrent_responses=asked["slots"],
            responses_per_prompt=asked["group"],
        )
        engine.generate(prompts, model.tokenizer, settings, list(range(count * asked["group"])))

    if asked["phase"] == "update":
        update()  # the optimizer's state is made by the first step
    else:
        inference(sequences(1, 4, vocabulary), 1, 4)
    return {"update": update, "inference": inference, "generate": generate}[asked["phase"]]


def measure(asked: dict, mesh) -> dict[str, int]:
    before, peak = peak_of(prepared(asked, mesh))
    return {"before": before, "peak": peak}


def measure_layout(asked: dict) -> list[dict[str, int]]:
    """The peaks of rank 0; all ranks are in one dimension of a mesh,
    and each phase has its own model."""
    shared = {key: asked[key] for key in ("config", "dtype")}

    def work(rank):
        mesh = mesh_of_ranks(**{asked["dimension"]: asked["ranks"]}) if asked["ranks"] > 1 else None
        return {"peaks": [measure({**shared, **run}, mesh) for run in asked["runs"]]}

    return run_on_ranks(asked["ranks"], work, timeout=200)[0]["peaks"]


if __name__ == "__main__":
    for backend in ("fsdp", "inference"):
        make_backend(ModelBackendAbstraction(backend))
    print(json.dumps([measure_layout(asked) for asked in json.loads(sys.argv[1])]))
