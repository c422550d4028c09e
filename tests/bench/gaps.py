"""How far the log-probs of sampled tokens are apart between a server and a trainer with the same
weights, in float32: one table.

    python tests/bench/gaps.py [--model FOLDER] [--server vllm] [--json]

The servers are real ones on the CPU (`make test-servers` makes their environments). Each samples
responses at temperature 0.8, and every engine that trains or scores, on one rank, computes the
log-probs of their tokens. Without `--model` the model is a tiny one. Each row is a trainer; it has
two columns for each server: the largest difference, in nats, from the server and from exact numbers
for the same tokens. The exit code is 1 if one is above its limit. The row `float64` is
transformers' own forward pass, which gives the exact numbers: how far the server is from them.
megatron needs a GPU: it gets a pretend device that computes in host memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

HOME = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HOME / "tests" / name) for name in ("servers", "fakes")]
from cpu_servers import OPTIONS, backend_arguments  # noqa: E402 - scripts of other folders
from pretend_cuda import pretend_cuda  # noqa: E402
from real_servers import HEAD_SIZE, AnyTokenizer, own_servers  # noqa: E402

from rlcli.api.config import GenerationHyperparameters  # noqa: E402
from rlcli.api.data import SequenceSample  # noqa: E402
from rlcli.testing.backend import BackendContract  # noqa: E402
from rlcli.testing.backend.forward import scores  # noqa: E402
from rlcli.testing.backend.generation import loaded  # noqa: E402
from rlcli.testing.backend.plain import exact, scores_of  # noqa: E402
from rlcli.testing.tiny_models import tiny_model  # noqa: E402

TRAINERS = ("fsdp", "deepspeed", "megatron", "inference")
LIMIT_OF_TINY, LIMIT_OF_ANY = 1e-5, 5e-5
"""In nats: for the tiny model, and for any other."""
PROMPTS = (3, 9, 17, 31)
RESPONSES, NEW_TOKENS, TEMPERATURE = 2, 64, 0.8
TINY_MODEL = {"head_dim": HEAD_SIZE, "tie_word_embeddings": True}


def sampled(server: str, lm: Any) -> tuple[SequenceSample, torch.Tensor]:
    """A batch of prompts with responses from a server, and the log-probs that it gives for the
    tokens of all responses."""
    draws = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, lm.config.vocab_size, (length,), generator=draws) for length in PROMPTS
    ]
    requested = SequenceSample.from_default(
        ids=range(len(prompts)),
        seqlens=list(PROMPTS),
        data={"packed_prompts": torch.cat(prompts)},
    )
    settings = GenerationHyperparameters(
        max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, responses_per_prompt=RESPONSES
    )
    seeds = range(len(prompts) * RESPONSES)
    tokenizer, arguments = AnyTokenizer(lm), backend_arguments(server)
    with (
        tempfile.TemporaryDirectory() as folder,
        own_servers(
            Path(folder), 1, server, lm=lm, engine_tokenizer=tokenizer, **arguments
        ) as engine,
    ):
        responses = engine.generate(requested, tokenizer, settings, seeds)
    pairs = [
        (prompt, responses.tokens[number * RESPONSES + turn])
        for number, prompt in enumerate(prompts)
        for turn in range(RESPONSES)
    ]
    return joined(pairs), torch.cat(responses.logprobs)


def joined(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> SequenceSample:
    """One sequence of each prompt and its response."""
    masks = [torch.arange(len(prompt) + len(rest)) < len(prompt) for prompt, rest in pairs]
    tokens = [torch.cat(pair) for pair in pairs]
    return SequenceSample.from_default(
        ids=range(len(pairs)),
        seqlens=[len(sequence) for sequence in tokens],
        data={"packed_input_ids": torch.cat(tokens), "prompt_mask": torch.cat(masks)},
    )


def in_responses(sample: SequenceSample) -> torch.Tensor:
    """[T - N] bool: the next token belongs to a response."""
    masks = sample.data["prompt_mask"].split(sample.flat_seqlens("prompt_mask"))
    return torch.cat([~mask[1:] for mask in masks])


def computed(trainer: str, lm: nn.Module, sample: SequenceSample) -> torch.Tensor:
    """Log-probs of the tokens of responses."""
    if trainer == "float64":
        with torch.no_grad():
            logprobs = scores_of(exact(copy.deepcopy(lm)), sample, TEMPERATURE)[0]
    else:
        checks: Any = BackendContract()
        checks.name, checks.args = trainer, {}
        is_for_gpus = "cpu" not in type(checks.backend()).DEVICES
        checks.device = "cuda:0" if is_for_gpus else "cpu"
        with pretend_cuda() if is_for_gpus else nullcontext():
            engine = checks.engine(lm=lm)
            logprobs = scores(engine, sample, "log-probs", TEMPERATURE)
    return logprobs[in_responses(sample)].double()


def gaps(servers: Sequence[str], lm: nn.Module) -> Iterator[dict[str, Any]]:
    """The rows of the table: a trainer, and its largest differences from each server, and from
    exact numbers for that server's tokens."""
    answers = {server: sampled(server, lm) for server in servers}
    exact_logprobs = {
        server: computed("float64", lm, sample) for server, (sample, _) in answers.items()
    }
    for trainer in ("float64", *TRAINERS):
        row: dict[str, Any] = {"trainer": trainer}
        for server, (sample, logprobs) in answers.items():
            computed_here = computed(trainer, lm, sample)
            row[server] = largest(computed_here - logprobs.double())
            row[f"{server}, exact"] = largest(computed_here - exact_logprobs[server])
        yield row


def largest(differences: torch.Tensor) -> float:
    return float(differences.abs().max())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--server", action="append", choices=list(OPTIONS))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    lm = loaded(options.model) if options.model else tiny_model("llama", **TINY_MODEL)
    limit = LIMIT_OF_ANY if options.model else LIMIT_OF_TINY
    rows = []
    for row in gaps(options.server or list(OPTIONS), lm.float()):
        if not (rows or options.json):
            print(*row, sep="  ")
        rows.append(row)
        if not options.json:
            print(*row.values(), f"(limit {limit:g})", sep="  ", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    worst = max(value for row in rows for value in row.values() if isinstance(value, float))
    return int(worst > limit)


if __name__ == "__main__":
    sys.exit(main())
