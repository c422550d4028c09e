"""How much memory each rank of a sharded model takes while it is loaded, trained, used and saved.

    python tests/bench/memory.py [--ranks 2 4] [--megabytes 512] [--zero-stage 3] [--json]

A random model is loaded, trained for two steps, used to generate, checkpointed and saved by fresh processes over gloo.
This process reads `RssAnon` of each every 10 ms: the memory that it has allocated itself. Pages of files do not count
(the kernel takes them back when it likes), nor do pages that processes share: fresh ones share no others. The C library
is told to give memory back as soon as it is freed (`MALLOC_*`): what is measured is what is held, not what an allocator
keeps for later.

Above a baseline (libraries imported, groups made, no model), each phase may take its share × 1.2, what the checkpoint
copies (`snapshot`), activations, the whole copy that generates, and beyond that the largest unsharded block and two
buckets. A bucket is the largest parameter, or BUCKET if that is more; BUCKET is far smaller here than the 256 MiB of
real models, or the bound would be larger than the model.

With `--zero-stage` it is `deepspeed` that shards, and BUCKET is its bucket. Its stage 3 keeps one such bucket and its
share of the gradients from load on, and holds another bucket of gathered parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
BUCKET = 64 * MIB
SLACK = 1.2
EVERY = 0.01
PHASES = ("load", "train", "generate", "checkpoint", "save")
COUNT, LENGTH, NEW = 2, 16, 8
"""Sequences per rank, and their tokens: few, so that activations are small beside weights."""

ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def configuration(megabytes: int) -> dict[str, Any]:
    """A llama of about so many MiB in float32; no parameter has more than a thirtieth of them."""
    hidden, vocabulary = 1024 if megabytes >= 256 else 512, 4096
    block = 4 * hidden**2 + 3 * hidden * 2816
    layers = max(2, round((megabytes * MIB / 4 - 2 * vocabulary * hidden) / block))
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": 2816, "num_hidden_layers": layers,
            "num_attention_heads": 16, "vocab_size": vocabulary, "tie_word_embeddings": False, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


# -- a rank --------------------------------------------------------------------------------------------------------


class Tokenizer:
    eos_token_id, pad_token_id = 2, 0

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def save_pretrained(self, folder: str) -> None:
        """Nothing to write."""


def make_backend(zero_stage: int | None) -> Any:
    """`fsdp`, or `deepspeed` in a stage, with buckets of the size that is allowed for."""
    from rlcli import registry
    from rlcli.api.config import ModelBackendAbstraction

    if zero_stage is None:
        return registry.make_backend(ModelBackendAbstraction("fsdp", {"dtype": "float32"}))
    made = registry.make_backend(ModelBackendAbstraction("deepspeed", {"dtype": "float32", "zero_stage": zero_stage}))
    import torch

    from rlcli.backends import _deepspeed_memory, _zero

    _zero.import_deepspeed(torch.device("cpu"))  # a library, not a part of the model
    _deepspeed_memory.BUCKET = BUCKET // 4
    return made


def be_a_rank(rank: int, ranks: int, megabytes: int, folder: Path, zero_stage: int | None) -> None:
    """All phases, with the moments between which each took place on stdout."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401 - a library, not a part of the model
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, MicroBatchSpec
    from rlcli.api.data import SequenceSample
    from rlcli.api.model import Model
    from rlcli.api.model_source import open_source
    from rlcli.checkpoint.state import copy_to_host, write_optimizer, write_weights

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    asked = configuration(megabytes)
    tokenizer: Any = Tokenizer(asked["vocab_size"])
    backend = make_backend(zero_stage)
    moments: dict[str, tuple[float, float]] = {}
    warm_up(torch, dist)

    def phase(name: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        time.sleep(5 * EVERY)
        began = time.monotonic()
        made = work()
        dist.barrier()
        moments[name] = began, time.monotonic()
        return made

    def sequences(key: str) -> SequenceSample:
        tokens = torch.randint(3, asked["vocab_size"], (COUNT * LENGTH,))
        return SequenceSample.from_default(ids=list(range(COUNT)), seqlens=[LENGTH] * COUNT, data={key: tokens})

    def load() -> Any:
        source = open_source(asked, head="lm", tokenizer=None, seed=1)
        model = Model("actor", None, tokenizer, torch.device("cpu"), source=source, device_mesh=mesh)
        return backend.initialize(model, FinetuneSpec(total_train_steps=2, dataset_size=8, train_batch_size=4)).module

    def train() -> None:
        for step in range(2):
            engine.train_batch(sequences("packed_input_ids"), lambda output, _: -output.logprobs.sum(), lambda _: 1.0,
                               mb_spec=MicroBatchSpec(), version_steps=step)  # fmt: skip

    def generate() -> None:
        settings = GenerationHyperparameters(max_new_tokens=NEW, min_new_tokens=NEW)
        engine.generate(sequences("packed_prompts"), tokenizer, settings, list(range(COUNT)))

    def checkpoint() -> None:
        kept = copy_to_host(engine.state(), leads=rank == 0)
        write_weights(kept, folder / "models", rank)
        write_optimizer(kept, folder / "optim", rank)

    phase("baseline", lambda: time.sleep(0.3))
    engine = phase("load", load)
    phase("train", train)
    phase("generate", generate)
    phase("checkpoint", checkpoint)
    phase("save", lambda: engine.save_to_hf(None, str(folder / "saved")))
    print(json.dumps(moments))
    sys.stdout.flush()
    os._exit(0)  # what it takes to end is not measured


def warm_up(torch: Any, dist: Any) -> None:
    """Collectives and matrix products load code when they are first used."""
    matrix = torch.ones(64, 64, requires_grad=True)
    (matrix @ matrix).sum().backward()
    torch.optim.AdamW([matrix]).step()
    dist.all_reduce(torch.ones(1024))


# -- looking at ranks ----------------------------------------------------------------------------------------------


def measured(ranks: int, megabytes: int, zero_stage: int | None) -> list[dict[str, int]]:
    """Of each rank, the most bytes above the baseline in every phase."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--megabytes", str(megabytes), "--folder", folder, "--ranks", str(ranks)]
        command += ["--zero-stage", str(zero_stage)] if zero_stage is not None else []
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            samples = sampled(processes)
            told = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return [above_baseline(samples[rank], json.loads(told[rank].splitlines()[-1])) for rank in range(ranks)]


def sampled(processes: Sequence[subprocess.Popen[str]]) -> list[list[tuple[float, int]]]:
    """(moment, bytes) of each process, until they have ended."""
    found: list[list[tuple[float, int]]] = [[] for _ in processes]
    while any(process.poll() is None for process in processes):
        began = time.monotonic()
        for samples, process in zip(found, processes, strict=True):
            if (held := own_memory(process.pid)) is not None:
                samples.append((time.monotonic(), held))
        time.sleep(max(0.0, EVERY - (time.monotonic() - began)))
    return found


def own_memory(pid: int) -> int | None:
    """Bytes that a process has allocated; None once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)


def above_baseline(samples: Sequence[tuple[float, int]], moments: dict[str, list[float]]) -> dict[str, int]:
    def within(name: str) -> list[int]:
        began, ended = moments[name]
        return [held for moment, held in samples if began <= moment <= ended]

    baseline = max(within("baseline"))
    return {name: max(within(name)) - baseline for name in PHASES}


# -- what they may take --------------------------------------------------------------------------------------------


def allowed(ranks: int, megabytes: int) -> dict[str, dict[str, int]]:
    """Phase → what a rank may take, in parts, in bytes."""
    import torch
    from transformers import AutoConfig

    from rlcli.api.model_skeleton import on_meta

    asked = configuration(megabytes)
    lm = on_meta(AutoConfig.for_model(**asked), "lm", torch.float32)
    sizes = {name: parameter.nbytes for name, parameter in lm.named_parameters()}
    blocks = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in lm.model.layers]
    whole, block = sum(sizes.values()), max(*blocks, sum(sizes.values()) - sum(blocks))
    share = whole // ranks
    beyond = block + 2 * max(BUCKET, *sizes.values())
    tokens, vocabulary, hidden = COUNT * LENGTH, asked["vocab_size"], asked["hidden_size"]
    per_token = 4 * (vocabulary * 6 + asked["num_hidden_layers"] * (12 * hidden + 4 * asked["intermediate_size"]))
    cache = COUNT * (LENGTH + NEW) * 2 * hidden * 4 * asked["num_hidden_layers"]
    parts = {
        "load": {"share": share},
        "train": {"share": 4 * share, "activations": tokens * per_token},
        "generate": {"share": 3 * share, "activations": tokens * per_token + 2 * cache, "copy": whole},
        "checkpoint": {"share": 3 * share, "snapshot": 3 * share},
        "save": {"share": 3 * share},
    }
    return {name: part | {"bound": beyond, "allowed": limit(part, beyond)} for name, part in parts.items()}


def limit(part: dict[str, int], beyond: int) -> int:
    others = sum(size for name, size in part.items() if name != "share")
    return int(SLACK * part["share"]) + others + beyond


def table(ranks: int, megabytes: int, found: Sequence[dict[str, int]]) -> list[str]:
    """What was measured on the fullest rank, next to what it may be; MiB."""
    columns = ("share", "snapshot", "activations", "copy", "bound", "allowed")
    lines = [f"{ranks} ranks, a model of {megabytes} MiB: the fullest rank above its baseline, in MiB",
             f"{'phase':12}{'measured':>10}" + "".join(f"{name:>13}" for name in columns)]  # fmt: skip
    for name, part in allowed(ranks, megabytes).items():
        most = max(one[name] for one in found)
        amounts = "".join(f"{part.get(column, 0) // MIB:13}" for column in columns)
        lines.append(f"{name:12}{most // MIB:10}{amounts}  {'ok' if most <= part['allowed'] else 'TOO MUCH'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=512, help="of the model, in float32")
    parser.add_argument("--json", action="store_true", help="rank by rank, with what is allowed, in bytes")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="of deepspeed, in place of fsdp")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        be_a_rank(asked.rank, asked.ranks[0], asked.megabytes, asked.folder, asked.zero_stage)
    for ranks in asked.ranks:
        found = measured(ranks, asked.megabytes, asked.zero_stage)
        if asked.json:
            print(json.dumps({"ranks": ranks, "measured": found, "allowed": allowed(ranks, asked.megabytes)}))
        else:
            print("\n".join(table(ranks, asked.megabytes, found)), flush=True)


if __name__ == "__main__":
    main()
