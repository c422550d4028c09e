"""How the time of an update grows: with tokens, on one rank and on two; with the length of
sequences; and with the responses to a prompt. Straight lines are fitted to each.

    python tests/bench/growth.py [--layers 4] [--rounds 3] [--scale 1] [--picture FILE] [--json]

The model has the widths and the vocabulary of SmolLM2-135M, with fewer layers and random weights.
Seconds are processor seconds of the busiest rank, which has one thread, the least of the rounds.
`--scale` multiplies the length of all sequences.

The exit code is 1 if an update takes a quarter more or less than its line says: something then
grows in another way than operations do (`tests/backends/test_growth.py` counts those).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction

SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LARGEST_DEVIATION = 0.25
COLOURS = ("#1f4e79", "#c05a00")
Sequences = list[tuple[list[int], list[int]]]
"""Prompt and response of each."""


@dataclass(frozen=True)
class Series:
    """Updates that differ in one number."""

    name: str
    unit: str
    """What the number counts."""
    plural: str
    numbers: tuple[int, ...]
    batch: Callable[[int, int], Sequences]
    """The batch of an update by the number and the scale."""
    ranks: int = 1


@dataclass(frozen=True)
class Line:
    """seconds = fixed + slope · number."""

    fixed: float
    slope: float
    deviation: float
    """The largest of the seconds from the line, as a share of what it says."""

    @classmethod
    def through(cls, numbers: Sequence[int], seconds: Sequence[float]) -> Line:
        slope, fixed = np.polyfit(numbers, seconds, 1)
        deviations = np.array(seconds) / (fixed + slope * np.array(numbers)) - 1
        return cls(float(fixed), float(slope), float(np.abs(deviations).max()))

    def formula(self, unit: str) -> str:
        return f"{self.fixed:.2f} s + {1000 * self.slope:.3g} ms per {unit}"


def drawn_tokens(count: int) -> list[int]:
    return [random.randrange(3, SHAPE["vocab_size"]) for _ in range(count)]


def rows_of(count: int, length: int) -> Sequences:
    """Sequences that share nothing, and are all response but for their first token."""
    return [(drawn_tokens(1), drawn_tokens(length - 1)) for _ in range(count)]


def group_of(responses: int, scale: int) -> Sequences:
    prompt = drawn_tokens(256 * scale)
    return [(prompt, drawn_tokens(32 * scale)) for _ in range(responses)]


def rows_of_128(tokens: int, scale: int) -> Sequences:
    return rows_of(tokens // 128, 128 * scale)


def rows_of_length(length: int, scale: int) -> Sequences:
    return rows_of(2048 // length, length * scale)


TOKENS, LENGTHS = (256, 512, 1024, 2048), (128, 256, 512, 1024, 2048)
SERIES = (
    Series("tokens", "token", "tokens", TOKENS, rows_of_128),
    Series("tokens, two ranks", "token", "tokens", TOKENS, rows_of_128, ranks=2),
    Series("length, 2,048 tokens", "token", "tokens of a sequence", LENGTHS, rows_of_length),
    Series("responses to a prompt", "response", "responses", (2, 4, 8, 16, 32), group_of),
)


class Tokenizer:
    eos_token_id, pad_token_id = 2, 0

    def __len__(self) -> int:
        return SHAPE["vocab_size"]


def seconds_of(series: Series, number: int, layers: int, rounds: int, scale: int) -> float:
    """Of an update, on its busiest rank."""
    from rlcli.testing.ranks import run_on_ranks

    def on_rank(rank: int) -> dict[str, Any]:
        update = make_update(layers, series.ranks)
        random.seed(number)
        sequences = series.batch(number, scale)[rank :: series.ranks]
        update(sequences)  # not timed: memory is allocated, and kernels are chosen
        return {"seconds": [processor_seconds(lambda: update(sequences)) for _ in range(rounds)]}

    by_rank = [result["seconds"] for result in run_on_ranks(series.ranks, on_rank, timeout=3600)]
    return min(max(each) for each in zip(*by_rank, strict=True))


def processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def make_update(layers: int, ranks: int) -> Callable[[Sequences], object]:
    import torch
    from peer_jobs import sample_of

    from rlcli.api.model import Model, call_interface
    from rlcli.api.model_source import open_source
    from rlcli.interfaces.sft import SFTInterface
    from rlcli.registry import make_backend
    from rlcli.testing.ranks import mesh_of_ranks

    tokenizer: Any = Tokenizer()
    shape = SHAPE | {"num_hidden_layers": layers}
    source = open_source(shape, head="lm", tokenizer=None, seed=1)
    mesh = mesh_of_ranks(dp=ranks)
    model = Model("actor", None, tokenizer, torch.device("cpu"), source=source, device_mesh=mesh)
    backend = make_backend(ModelBackendAbstraction("fsdp", {"dtype": "float32"}))
    role = backend.initialize(
        model, FinetuneSpec(total_train_steps=10, dataset_size=8, train_batch_size=8)
    )
    return lambda sequences: call_interface(
        SFTInterface(), "train_step", role, sample_of([[each] for each in sequences])
    )


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """The series with their lines, those over tokens in one panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [results[:2], *([result] for result in results[2:])]
    figure = Figure(figsize=(11, 3.4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for axis, shown in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for result, colour in zip(shown, COLOURS, strict=False):
            draw_series(axis, result, colour)
        axis.set_title(shown[0]["name"], loc="left", fontsize=10)
        axis.set_xlabel(shown[0]["plural"], fontsize=9)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    figure.axes[0].set_ylabel("processor seconds of an update", fontsize=9)
    figure.savefig(file)


def draw_series(axis: Any, result: dict[str, Any], colour: str) -> None:
    numbers, line = np.array(result["numbers"]), Line(**result["line"])
    axis.plot(numbers, result["seconds"], "o", color=colour, markersize=4)
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    label = f"{ranks}: {result['formula']}"
    axis.plot(numbers, line.fixed + line.slope * numbers, color=colour, label=label)


def measure(series: Series, layers: int, rounds: int, scale: int) -> dict[str, Any]:
    seconds = [seconds_of(series, number, layers, rounds, scale) for number in series.numbers]
    line = Line.through(series.numbers, seconds)
    return {
        "name": series.name,
        "unit": series.unit,
        "plural": series.plural,
        "ranks": series.ranks,
        "numbers": series.numbers,
        "seconds": seconds,
        "line": vars(line),
        "formula": line.formula(series.unit),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    how = parser.parse_args(arguments)
    results = []
    for series in SERIES:
        result = measure(series, how.layers, how.rounds, how.scale)
        results.append(result)
        if not how.json:
            deviation = result["line"]["deviation"]
            print(f"{series.name:<24} {result['formula']:<40} ± {deviation:.0%}", flush=True)
    if how.json:
        print(json.dumps(results, indent=2))
    if how.picture:
        draw(results, how.picture)
    return int(any(result["line"]["deviation"] > LARGEST_DEVIATION for result in results))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
