"""Plausible batches over the tiny engine's vocabulary, for any key known to graphs,
with no model behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import MEANINGS, full
from rlcli.checkpoint.light_tokenizer import Encoded

VOCABULARY = 11
"""Tokens of the tiny engine: 0 pads, 1 ends, 2 + d is the digit d."""
END = 1
DIGITS = "012345678"

TOKENIZER_FILE = "tokenizer_config.json"
"""The file that any saved tokenizer leaves in its folder."""

Lengths = Sequence[Sequence[tuple[int, int]]]
"""For each sample in a batch the (prompt, response) lengths of its sequences, in tokens."""

PAIRS: Lengths = [[(2 + i % 3, 3 + i % 5), (2 + i % 3, 1 + (3 * i) % 7)] for i in range(8)]
"""Eight samples of two responses each, of different lengths."""


class DigitTokenizer:
    """The part of a tokenizer that interfaces and engines use."""

    eos_token_id = END
    pad_token_id = 0
    chat_template = None

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        return Encoded(
            self.encode(text) if isinstance(text, str) else [self.encode(line) for line in text]
        )

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [2 + int(digit) for digit in text if digit in DIGITS]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(str(int(i) - 2) for i in ids if i >= 2 or not skip_special_tokens)

    def save_pretrained(self, folder: Any) -> None:
        """Its only file, which is never read."""
        Path(folder).joinpath(TOKENIZER_FILE).write_text("{}\n")


def make_batch(
    keys: Iterable[str],
    lengths: Lengths = PAIRS,
    seed: int = 0,
    *,
    vocabulary: int = VOCABULARY,
    end: int = END,
    metadata: Mapping[str, list[Any]] | None = None,
) -> SequenceSample:
    """A batch with `keys`, deterministic in its arguments; a key's values do not depend on which
    others there are.

    A prompt is the same for all sequences of a sample. About three out of four responses end by
    themselves, with the token `end`; the others were cut off (`seq_no_eos_mask`). Per-token numbers
    are drawn on prompts too, where nothing should read them. Metadata: `batch_index`, `answer` (a
    digit), and what is given.

    Raises ValueError for a key unknown to graphs: only its author knows its meaning,
    and adds it to a batch.
    """
    draw, requested = _Draw(lengths, seed, vocabulary, end), list(keys)
    unknown = [key for key in requested if key not in _MAKERS]
    if unknown:
        raise ValueError(f"the content of {unknown[0]!r} is unknown; known keys: {', '.join(KEYS)}")
    numbers = range(len(lengths))
    return SequenceSample.from_default(
        ids=[f"s{i}" for i in numbers],
        seqlens={key: draw.rows(key) for key in requested},
        data={key: _MAKERS[key](draw, key) for key in requested},
        metadata={
            "batch_index": [*numbers],
            "answer": [str((seed + i) % (vocabulary - 2)) for i in numbers],
            **(metadata or {}),
        },
    )


class _Draw:
    """The random draws of one batch, each from its own stream."""

    def __init__(self, groups: Lengths, seed: int, vocabulary: int, end: int):
        self.groups = groups
        self.pairs = [pair for group in groups for pair in group]
        self.seed = seed
        self.vocabulary = vocabulary
        self.end = end

    def stream(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + sum(name.encode()))

    def rows(self, key: str) -> list[list[int]]:
        """The lengths of `key`, according to its meaning."""
        if key == "packed_prompts":
            return [[group[0][0]] for group in self.groups]
        rule = MEANINGS[key].rows if key in MEANINGS else full
        return [[rule(prompt + response) for prompt, response in group] for group in self.groups]

    def size(self, key: str) -> int:
        return sum(map(sum, self.rows(key)))

    def normal(self, key: str) -> torch.Tensor:
        return torch.randn(self.size(key), generator=self.stream(key))

    def uniform(self, key: str) -> torch.Tensor:
        return torch.rand(self.size(key), generator=self.stream(key))

    def logprobs(self, key: str) -> torch.Tensor:
        return -1.5 - self.uniform(key)

    def prompts(self, _key: str) -> torch.Tensor:
        """[prompt tokens], each sample's prompt once."""
        return torch.tensor([*chain(*(prompt for prompt, _ in self._texts()))], dtype=torch.int64)

    def tokens(self, _key: str) -> torch.Tensor:
        """[T]: the first tokens of a sample's prompt, then each response."""
        tokens: list[int] = []
        ended = iter(self.ended().tolist())
        for group, (prompt, responses) in zip(self.groups, self._texts(), strict=True):
            for (length, _), response in zip(group, responses, strict=True):
                tokens += prompt[:length] + response
                if next(ended):
                    tokens[-1] = self.end
        return torch.tensor(tokens, dtype=torch.int64)

    def _texts(self) -> Iterator[tuple[list[int], list[list[int]]]]:
        """(prompt, responses) of each sample; the prompt as long as its longest."""
        stream, lowest = self.stream("texts"), min(3, self.vocabulary - 1)

        def text(length: int) -> list[int]:
            return torch.randint(lowest, self.vocabulary, (length,), generator=stream).tolist()

        for group in self.groups:
            prompt = text(max((length for length, _ in group), default=0))
            yield prompt, [text(length) for _, length in group]

    def prompt_mask(self, _key: str) -> torch.Tensor:
        mask = [at < prompt for prompt, response in self.pairs for at in range(prompt + response)]
        return torch.tensor(mask, dtype=torch.bool)

    def loss_mask(self, _key: str) -> torch.Tensor:
        """[T - N] bool: the actions of responses."""
        mask = [
            at >= prompt for prompt, response in self.pairs for at in range(1, prompt + response)
        ]
        return torch.tensor(mask, dtype=torch.bool)

    def chosen(self, _key: str) -> torch.Tensor:
        """[N] bool: about two out of three, and at least one of each sample."""
        stream, chosen = self.stream("chosen"), []
        for group in self.groups:
            drawn = torch.rand(len(group), generator=stream).tolist()
            chosen += [number < 0.67 or number == min(drawn) for number in drawn]
        return torch.tensor(chosen, dtype=torch.bool)

    def desirable(self, _key: str) -> torch.Tensor:
        """[N] bool: about half of them."""
        return torch.rand(len(self.pairs), generator=self.stream("desirable")) < 0.5

    def solved(self, _key: str) -> torch.Tensor:
        return torch.randint(0, 2, (len(self.pairs),), generator=self.stream("rewards")) > 0

    def ended(self) -> torch.Tensor:
        """[N] bool; an empty response cannot have ended."""
        drawn = torch.rand(len(self.pairs), generator=self.stream("ended")) < 0.75
        return drawn & torch.tensor([response > 0 for _, response in self.pairs], dtype=torch.bool)


_MAKERS: dict[str, Callable[[_Draw, str], torch.Tensor]] = {
    "packed_prompts": _Draw.prompts,
    "packed_input_ids": _Draw.tokens,
    "prompt_mask": _Draw.prompt_mask,
    "packed_logprobs": _Draw.logprobs,
    "packed_ref_logprobs": _Draw.logprobs,
    "proximal_logprobs": _Draw.logprobs,
    "values": lambda draw, key: 0.3 * draw.normal(key),
    "dense_rewards": _Draw.normal,
    "rewards": lambda draw, key: draw.solved(key).float(),
    "solved": _Draw.solved,
    "seq_no_eos_mask": lambda draw, _: ~draw.ended(),
    "margins": _Draw.normal,
    "loss_mask": _Draw.loss_mask,
    "old_logprobs": _Draw.logprobs,
    "advantages": _Draw.normal,
    "returns": _Draw.normal,
    "loss_weights": lambda draw, key: 0.5 + draw.uniform(key),
    "kl_weights": lambda draw, key: 0.2 * draw.uniform(key),
    "chosen": _Draw.chosen,
    "desirable": _Draw.desirable,
    "mismatched_input_ids": _Draw.tokens,
    "mismatched_prompt_mask": _Draw.prompt_mask,
    # below those of a tiny model, so that the KL that they estimate is above 0
    "mismatched_ref_logprobs": lambda draw, key: draw.logprobs(key) - 3.0,
}
KEYS = tuple(_MAKERS)
"""All known keys."""
