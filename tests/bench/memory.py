"""How much memory each rank of a sharded model takes while it is loaded, trained, used and saved.

    python tests/bench/memory.py [--ranks 2 4] [--megabytes 512] [--dimension dp] [--length 16]
                                 [--json]
    python tests/bench/memory.py --zero-stage 3 [--offload optimizer parameters]
                                 [--ranks 2 4] [--megabytes 512]

A random model is loaded, trained for two steps, used to generate, checkpointed and saved by
processes over gloo: forks of this one, which has the libraries loaded. It reads `RssAnon` of each
every 10 ms: memory that is not a file's (the kernel takes back pages of files when it likes). What
a fork has of its parent is in the baseline. The C library returns memory as soon as it is freed
(`MALLOC_*`): what is measured is what is held, not what an allocator keeps for later.

`planned` is what the backend's memory model says, which `rlcli plan` shows. Above a baseline
(libraries imported, groups made, no model), each phase of `fsdp` may take its share × 1.2, what the
checkpoint copies (`snapshot`), activations, the whole copy that generates, and beyond that the
largest unsharded block and two buckets. A bucket is the largest parameter, or an eighth of the
model (and 16 MiB) if that is more: with the 256 MiB of real models the bound would be larger than
the model.

With `--dimension cp` ranks share the sequences, which are worth it with a `--length`; with
`--dimension ep`, data-parallel ranks divide the experts of a mixture.

With `--zero-stage` it is `deepspeed` that shards, with such a bucket; what that keeps depends on
the stage, and is compared with the plan alone.

The exit code is 1 if a phase takes more than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
SLACK = 1.2
EVERY = 0.01
PHASES = ("load", "train", "generate", "checkpoint", "save")
COUNT, LENGTH, NEW = 2, 16, 8
"""Sequences of a batch, and their tokens: few, so that activations are small next to weights."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "2",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Asked:
    """What is measured."""

    ranks: int
    megabytes: int
    zero_stage: int | None
    """Of deepspeed; None: fsdp."""
    offload: tuple[str, ...]
    dimension: str = "dp"
    """Of the mesh."""
    length: int = LENGTH
    """Tokens of a sequence."""

    @property
    def degrees(self) -> dict[str, int]:
        """Of the mesh: experts are divided among data-parallel ranks."""
        return {self.dimension: self.ranks} | ({"dp": self.ranks} if self.has_experts else {})

    @property
    def has_experts(self) -> bool:
        return self.dimension == "ep"

    @property
    def tokens(self) -> int:
        """That a rank computes with in a pass."""
        return COUNT * self.length // (self.ranks if self.dimension == "cp" else 1)

    @property
    def backend(self) -> str:
        return "fsdp" if self.zero_stage is None else "deepspeed"

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the backend."""
        zero = {} if self.zero_stage is None else {"zero_stage": self.zero_stage}
        return {"dtype": "float32", **zero, **{f"offload_{what}": True for what in self.offload}}

    @property
    def bucket(self) -> int:
        """Bytes of the smallest."""
        return max(16, self.megabytes // 8) * MIB

    @property
    def configuration(self) -> dict[str, Any]:
        """A llama of about `megabytes` MiB in float32, or a mixtral."""
        hidden, vocabulary = (1024, 4096) if self.megabytes >= 256 else (256, 1024)
        mlp = 11 * hidden // 4
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2} if self.has_experts else {}
        block = 4 * hidden**2 + experts.get("num_local_experts", 1) * 3 * hidden * mlp
        layers = max(2, round((self.megabytes * MIB / 4 - 2 * vocabulary * hidden) / block))
        return {
            "model_type": "mixtral" if self.has_experts else "llama",
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": vocabulary,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **experts,
        }


# -- a rank ----------------------------------------------------------------------------------------


class Tokenizer:
    eos_token_id, pad_token_id = 2, 0

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def save_pretrained(self, folder: str) -> None:
        """Nothing to write."""


def import_libraries(asked: Asked) -> None:
    """Import them before ranks are forked."""
    import torch
    import torch._dynamo
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    import rlcli.checkpoint.state  # noqa: F401
    from rlcli.api.config import ModelBackendAbstraction
    from rlcli.registry import make_backend

    make_backend(ModelBackendAbstraction(asked.backend))
    if asked.zero_stage is not None:
        from rlcli.backends import _deepspeed_memory, _zero

        _zero.import_deepspeed(torch.device("cpu"))
        _deepspeed_memory.BUCKET = asked.bucket // 4


def run_rank(rank: int, asked: Asked, folder: Path) -> dict[str, tuple[float, float, int]]:
    """All phases of a rank: when each began and ended, and the bytes of the process then."""
    import torch
    import torch.distributed as dist

    from rlcli.api.config import (
        FinetuneSpec,
        GenerationHyperparameters,
        MicroBatchSpec,
        ModelBackendAbstraction,
    )
    from rlcli.api.data import SequenceSample
    from rlcli.api.model import Model
    from rlcli.api.model_source import open_source
    from rlcli.checkpoint.state import copy_to_host, write_optimizer, write_weights
    from rlcli.registry import make_backend
    from rlcli.testing.ranks import mesh_of_ranks

    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    vocabulary = asked.configuration["vocab_size"]
    tokenizer: Any = Tokenizer(vocabulary)
    backend = make_backend(ModelBackendAbstraction(asked.backend, asked.arguments))
    mesh = mesh_of_ranks(**asked.degrees)
    draws = torch.Generator().manual_seed(0)  # the same for ranks that share sequences
    seen: dict[str, tuple[float, float, int]] = {}
    warm_up(torch, dist)

    def phase(name: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        time.sleep(5 * EVERY)
        began = time.monotonic()
        result = work()
        dist.barrier()
        seen[name] = began, time.monotonic(), own_memory(os.getpid()) or 0
        return result

    def sequences(key: str) -> SequenceSample:
        tokens = torch.randint(3, vocabulary, (COUNT * asked.length,), generator=draws)
        return SequenceSample.from_default(
            ids=list(range(COUNT)), seqlens=[asked.length] * COUNT, data={key: tokens}
        )

    def load() -> Any:
        source = open_source(asked.configuration, head="lm", tokenizer=None, seed=1)
        model = Model(
            "actor",
            None,
            tokenizer,
            torch.device("cpu"),
            source=source,
            device_mesh=mesh,
            expert_ranks=asked.degrees.get("ep", 1),
        )
        return backend.initialize(
            model, FinetuneSpec(total_train_steps=2, dataset_size=8, train_batch_size=4)
        ).module

    def train() -> None:
        for step in range(2):
            engine.train_batch(
                sequences("packed_input_ids"),
                lambda output, _: -output.logprobs.sum(),
                lambda _: 1.0,
                mb_spec=MicroBatchSpec(),
                version_steps=step,
            )

    def generate() -> None:
        settings = GenerationHyperparameters(max_new_tokens=NEW, min_new_tokens=NEW)
        engine.generate(sequences("packed_prompts"), tokenizer, settings, list(range(COUNT)))

    def checkpoint() -> None:
        for subfolder in ("models", "optim"):
            (folder / subfolder).mkdir(exist_ok=True)
        copy = copy_to_host(engine.state(), leads=rank == 0)
        write_weights(copy, folder / "models", rank)
        write_optimizer(copy, folder / "optim", rank)

    phase("baseline", lambda: time.sleep(0.1))
    engine = phase("load", load)
    phase("train", train)
    phase("generate", generate)
    phase("checkpoint", checkpoint)
    phase("save", lambda: engine.save_to_hf(None, str(folder / "saved")))
    return seen


def warm_up(torch: Any, dist: Any) -> None:
    """Collectives and matrix products load code when they are first used."""
    matrix = torch.ones(64, 64, requires_grad=True)
    (matrix @ matrix).sum().backward()
    torch.optim.AdamW([matrix]).step()
    dist.all_reduce(torch.ones(1024))


# -- measuring ranks -------------------------------------------------------------------------------


def measured(asked: Asked) -> list[dict[str, int]]:
    """Of each rank, the most bytes above the baseline in every phase."""
    from rlcli.testing.ranks import run_on_ranks

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as thread:
        folder = Path(name)
        running = thread.submit(
            run_on_ranks, asked.ranks, lambda rank: run_rank(rank, asked, folder), 300
        )
        samples = sampled(running, [folder / f"{rank}.pid" for rank in range(asked.ranks)])
        return [above_baseline(*both) for both in zip(samples, running.result(), strict=True)]


def sampled(running: Future[Any], files: Sequence[Path]) -> list[list[tuple[float, int]]]:
    """(moment, bytes) of each process, by the files that name them, until all is done."""
    samples_by_process: list[list[tuple[float, int]]] = [[] for _ in files]
    while not running.done():
        began = time.monotonic()
        for samples, file in zip(samples_by_process, files, strict=True):
            if (
                file.exists()
                and (pid := file.read_text())
                and (size := own_memory(int(pid))) is not None
            ):
                samples.append((time.monotonic(), size))
        time.sleep(max(0.0, EVERY - (time.monotonic() - began)))
    return samples_by_process


def own_memory(pid: int) -> int | None:
    """Bytes of a process that are not a file's; None once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)


def above_baseline(
    samples: Sequence[tuple[float, int]], seen: dict[str, list[Any]]
) -> dict[str, int]:
    def most(name: str) -> int:
        began, ended, at_end = seen[name]
        return max([at_end, *(held for moment, held in samples if began <= moment <= ended)])

    return {name: most(name) - most("baseline") for name in PHASES}


# -- limits ----------------------------------------------------------------------------------------


def allowed(asked: Asked) -> dict[str, dict[str, int]]:
    """Phase → what a rank may take, in parts, in bytes."""
    import torch
    from transformers import AutoConfig

    from rlcli.api.model_skeleton import on_meta

    config = asked.configuration
    lm = on_meta(AutoConfig.for_model(**config), "lm", torch.float32)
    sizes = {name: parameter.nbytes for name, parameter in lm.named_parameters()}
    blocks = [
        sum(parameter.nbytes for parameter in layer.parameters()) for layer in lm.model.layers
    ]
    total, block = sum(sizes.values()), max(*blocks, sum(sizes.values()) - sum(blocks))
    share = total // asked.ranks
    beyond = block + 2 * max(asked.bucket, *sizes.values())
    tokens, vocabulary, hidden = asked.tokens, config["vocab_size"], config["hidden_size"]
    per_token = 4 * (
        vocabulary * 6
        + config["num_hidden_layers"] * (12 * hidden + 4 * config["intermediate_size"])
    )
    cache = COUNT * (asked.length + NEW) * 2 * hidden * 4 * config["num_hidden_layers"]
    parts = {
        "load": {"share": share},
        "train": {"share": 4 * share, "activations": tokens * per_token},
        "generate": {
            "share": 3 * share,
            "activations": tokens * per_token + 2 * cache,
            "copy": total,
        },
        "checkpoint": {"share": 3 * share, "snapshot": 3 * share},
        "save": {"share": 3 * share},
    }
    return {
        name: part | {"bound": beyond, "allowed": limit(part, beyond)}
        for name, part in parts.items()
    }


def limit(sizes: dict[str, int], beyond: int) -> int:
    others = sum(size for name, size in sizes.items() if name != "share")
    return int(SLACK * sizes["share"]) + others + beyond


def planned(asked: Asked) -> dict[str, int]:
    """Phase → bytes that the backend's memory model expects; it does not speak of saving."""
    from rlcli.api.memory import Generation, PlacedRole
    from rlcli.backends._deepspeed_memory import DeepSpeedMemory
    from rlcli.backends._fsdp_memory import FSDPMemory
    from rlcli.topology.architecture import read_architecture

    kind: Any = FSDPMemory if asked.zero_stage is None else DeepSpeedMemory
    sizes, mesh = (
        read_architecture(asked.configuration),
        dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1) | asked.degrees,
    )
    calls = ("train_step", "inference", "generate")
    longest, tokens = asked.length + NEW, COUNT * asked.length
    model = kind(PlacedRole(sizes, "lm", mesh, asked.arguments, calls, longest, "cpu"))
    resident, generation = model.resident(), Generation(COUNT, 1, asked.length, NEW, COUNT)
    return {
        "load": resident.weights + resident.buffers + model.load().total,
        "train": resident.total + model.update(tokens, 1).total,
        "generate": resident.total + model.generate(generation).total,
        "checkpoint": resident.total + model.snapshot(),
    }


def table(asked: Asked, peaks: Sequence[dict[str, int]]) -> list[str]:
    """What was measured on the fullest rank, next to what was planned and what it may be; MiB."""
    settings = [f"{name}={value}" for name, value in asked.arguments.items() if name != "dtype"]
    columns = (
        ("share", "snapshot", "activations", "copy", "bound", "allowed")
        if asked.zero_stage is None
        else ()
    )
    header = "".join(f"{name:>12}" for name in ("measured", "planned", "off by", *columns))
    lines = [
        (
            f"{' '.join([asked.backend, *settings])}, {asked.dimension}{asked.ranks}, a model of "
            f"{asked.megabytes} MiB: the fullest rank above its baseline, in MiB"
        ),
        f"{'phase':12}{header}",
    ]
    expected = planned(asked)
    for name, sizes in allowed(asked).items():
        most = max(one[name] for one in peaks)
        plan, off = ("-", "-")
        if name in expected:
            plan, off = f"{expected[name] / MIB:.0f}", f"{expected[name] / most - 1:+.0%}"
        limits = "".join(f"{sizes.get(column, 0) // MIB:12}" for column in columns)
        verdict = "" if not columns else "  ok" if most <= sizes["allowed"] else "  TOO MUCH"
        lines.append(f"{name:12}{most / MIB:12.0f}{plan:>12}{off:>12}{limits}{verdict}")
    return lines


def is_too_much(asked: Asked, peaks: Sequence[dict[str, int]]) -> bool:
    """Whether a phase took more than it may; deepspeed has no bound."""
    if asked.zero_stage is not None:
        return False
    bounds = {name: part["allowed"] for name, part in allowed(asked).items()}
    return any(one[name] > bound for one in peaks for name, bound in bounds.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=512, help="of the model, in float32")
    parser.add_argument(
        "--json", action="store_true", help="rank by rank, with what is allowed, in bytes"
    )
    parser.add_argument("--dimension", choices=("dp", "cp", "ep"), default="dp", help="of the mesh")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument(
        "--zero-stage", type=int, choices=range(4), help="of deepspeed, in place of fsdp"
    )
    parser.add_argument(
        "--offload", nargs="+", default=[], choices=["optimizer", "parameters"], help="by deepspeed"
    )
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    code = 0
    for ranks in options.ranks:
        asked = Asked(
            ranks,
            options.megabytes,
            options.zero_stage,
            tuple(options.offload),
            options.dimension,
            options.length,
        )
        import_libraries(asked)
        peaks = measured(asked)
        if options.json:
            print(
                json.dumps(
                    {
                        "ranks": ranks,
                        "measured": peaks,
                        "allowed": allowed(asked),
                        "planned": planned(asked),
                    }
                ),
                flush=True,
            )
        else:
            print("\n".join(table(asked, peaks)), flush=True)
        code = max(code, int(is_too_much(asked, peaks)))
    return code


if __name__ == "__main__":
    sys.exit(main())
