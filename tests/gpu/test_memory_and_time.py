"""The memory that a plan states for updates, inference and generation is what the GPU's allocator
needs; both, and the time of each phase, are drawn over the batch in build/gpu/."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from estimated_peak import MODELS, estimated
from measured_peak import prepared

MIB = 1 << 20
REPORTS = Path(__file__).parents[2] / "build" / "gpu"
BIG = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
       "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
       "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
       "tie_word_embeddings": True}  # fmt: skip
SMALL = {**BIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 512}  # fmt: skip
SIZES = {"cuda": (BIG, "bfloat16", 512, (4, 8, 16)), "cpu": (SMALL, "float32", 32, (2, 4, 8))}
"""Device → model, dtype, tokens of a sequence, numbers of sequences."""
PHASES = {
    "update, fsdp": {"phase": "update", "backend": "fsdp"},
    "scores, inference": {"phase": "inference", "backend": "inference"},
    "generation, inference": {"phase": "generate", "backend": "inference", "group": 4, "new": 16},
}
REPEATS = 3


@pytest.fixture(scope="module")
def reports(device_name, tmp_path_factory):
    """Where graphs are written: only those of a GPU are kept."""
    folder = REPORTS if device_name == "cuda" else tmp_path_factory.mktemp("reports")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measured(run, cuda):
    """Peak bytes of the device and seconds of a phase."""
    work = prepared(run)
    work()  # kernels are compiled and buffers of libraries made only once
    torch.cuda.synchronize(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize(cuda)
    seconds = (time.perf_counter() - begin) / REPEATS
    return {"peak": torch.cuda.max_memory_allocated(cuda), "seconds": seconds}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_planned_memory_is_within_the_stated_error(phase, cuda, device_name, reports):
    config, dtype, length, counts = SIZES[device_name]
    points = []
    for count in counts:
        run = {
            "config": config,
            "dtype": dtype,
            "device": "cuda:0",
            "count": count,
            "length": length,
            "slots": 4 * count,
            **PHASES[phase],
        }
        _, planned = estimated(run, config, dtype, device="cuda")
        points.append({"tokens": count * length, "planned": planned, **measured(run, cuda)})
    draw(phase, points, reports)
    if device_name == "cpu":
        return  # the emulated kernels hold what those of a GPU do not
    within = MODELS[PHASES[phase]["backend"]].WITHIN_PERCENT / 100
    for point in points:
        assert point["planned"] == pytest.approx(point["peak"], rel=within), point


def draw(phase, points, folder):
    """`PHASE.json` and `PHASE.png`: memory planned and measured, and tokens per second."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    name = phase.replace(", ", "_")
    (folder / f"{name}.json").write_text(json.dumps(points, indent=1) + "\n")
    tokens = [point["tokens"] for point in points]
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for key in ("planned", "peak"):
        memory.plot(tokens, [point[key] / MIB for point in points], marker="o", label=key)
    memory.set(title=f"{phase}: memory", xlabel="tokens", ylabel="MiB", ylim=0)
    memory.legend()
    rates = [point["tokens"] / point["seconds"] for point in points]
    speed.plot(tokens, rates, marker="o")
    speed.set(title=f"{phase}: time", xlabel="tokens", ylabel="tokens per second", ylim=0)
    figure.savefig(folder / f"{name}.png")
    pyplot.close(figure)
