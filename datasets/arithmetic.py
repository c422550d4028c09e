"""Generated arithmetic problems as prompts: what PPO trains on and is examined on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from . import _arithmetic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@register_dataset("arithmetic")
@dataclass(kw_only=True)
class Arithmetic:
    """Sums and differences in symbols and in words; train and held-out splits share no problem."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    problems: int = 4096
    """How many problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties, taken in turn: the number of operations."""

    held_out: bool = False
    """Problems of the held-out split instead of the training split."""

    seed: int = 0
    """Which problems are drawn."""

    _problems: list[_arithmetic.Problem] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._problems = _arithmetic.problems(self.problems, seed=self.seed, levels=self.levels, held_out=self.held_out)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> SequenceSample:
        problem = self._problems[index]
        tokens = torch.tensor(self.util.tokenizer(f"{problem.question}\n").input_ids)
        split = "held-out" if self.held_out else "train"
        return SequenceSample.from_default(
            ids=[f"arithmetic-{split}-{self.seed}:{index}"],
            seqlens=[len(tokens)],
            data={"packed_prompts": tokens},
            metadata={"answer": [problem.answer], "question": [problem.question]},
        )

    @staticmethod
    def make_tokenizer() -> PreTrainedTokenizerFast:
        """What `tokenizer: builtin:arithmetic` means."""
        return _arithmetic.tokenizer()
