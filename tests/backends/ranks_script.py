"""Run under torchrun: trains a tiny model for three steps on the ranks' shares of each batch; rank 0 writes numbers.

Then it saves its state, takes every state beside it, of whatever number of ranks, and trains one step more with each.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.model import Model
from rlcli.checkpoint.state import copy_to_host, fill, write_optimizer, write_weights
from rlcli.registry import make_backend
from rlcli.testing.tiny_models import VOCABULARY, TinyTokenizer, tiny_model

LENGTHS = [5, 11, 3, 8, 2, 9, 7]


def batch(step):
    torch.manual_seed(step)
    return SequenceSample.from_default(
        ids=[f"s{i}" for i in range(len(LENGTHS))],
        seqlens=LENGTHS,
        data={"packed_input_ids": torch.randint(3, VOCABULARY, (sum(LENGTHS),))},
    )


def nll(output, sample):
    return -output.logprobs.sum()


def share(sample, rank, size, step):
    """Uneven on purpose; at step 2 the last of several ranks has nothing."""
    if size == 1:
        return sample
    cut = [4, 5, len(LENGTHS)][step]
    return sample.select_indices(range(cut) if rank == 0 else range(cut, len(LENGTHS)))


def restore(engine, folder):
    """Spoil what the engine holds, then fill it from files."""
    state = engine.state(room_for_optimizer=True)
    for tensor in (*state.weights.values(), *state.optimizer.values()):
        tensor.fill_(7.0)
    fill(state.weights, folder / "models")
    fill(state.optimizer, folder / "optim")
    engine.state_was_filled()


def main(out: Path) -> None:
    state = out.with_suffix(".state")
    (state / "models").mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = Model("actor", tiny_model(), TinyTokenizer(), torch.device("cpu"), device_mesh=mesh)
    spec = FinetuneSpec(total_train_steps=3, dataset_size=21, train_batch_size=7)
    backend = make_backend(ModelBackendAbstraction("fsdp", {"lr": 1e-3, "dtype": "float32"}))
    engine = backend.initialize(model, spec).module
    steps = [
        engine.train_batch(
            share(batch(step), rank, size, step), nll, lambda s: s.bs and s.data["packed_input_ids"].numel() - s.bs,
            mb_spec=MicroBatchSpec(n_mbs=1 + step),
        )
        for step in range(3)
    ]  # fmt: skip
    poisoned = engine.train_batch(
        share(batch(0), rank, size, 0), lambda o, s: nll(o, s) * (float("nan") if rank == 0 else 1.0), lambda s: 1
    )
    prompts = SequenceSample.from_default(ids=["p"], seqlens=[4], data={"packed_prompts": torch.tensor([5, 6, 7, 8])})
    gconfig = GenerationHyperparameters(max_new_tokens=6)
    response = engine.generate(prompts, TinyTokenizer(), gconfig, [3]).tokens[0].tolist()
    engine.save_to_hf(None, str(out.with_suffix(".model")))
    copy = copy_to_host(engine.state(), leads=rank == 0)
    write_weights(copy, state / "models", rank)
    write_optimizer(copy, state / "optim", rank)
    dist.barrier()
    resumed = {}
    for name in sorted(path.name for path in state.parent.glob("*.state")):
        restore(engine, state.parent / name)
        resumed[name] = engine.train_batch(share(batch(9), rank, size, 0), nll, lambda s: s.bs, version_steps=2)
    if rank == 0:
        told = {"steps": steps, "poisoned": poisoned["update_skipped"], "response": response, "resumed": resumed}
        out.write_text(json.dumps(told))
    del engine, model, backend, mesh
    gc.collect()  # what holds the process group goes before it does
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
