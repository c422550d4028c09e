"""Generated arithmetic problems as prompts: what PPO trains on and is examined on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rlcli.api.data import DatasetUtility, Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits, check_limits

from . import _arithmetic
from ._rendering import encode_prompts
from ._samples import prompt_sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@register_dataset("arithmetic")
@dataclass(kw_only=True)
class Arithmetic:
    """Sums and differences in symbols and in words; train and held-out splits share no problem."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    DRAWN: ClassVar[bool] = True
    LONGEST: ClassVar[int] = 40
    """Tokens of the longest prompt at the default levels."""
    VOCABULARY: ClassVar[int] = 380
    """Tokens of the tokenizer that it brings along."""

    LIMITS: ClassVar[Limits] = {"problems": {"ge": 1, "le": 10_000_000}}

    util: DatasetUtility

    problems: int = 4096
    """How many problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties, taken in turn: the number of operations."""

    held_out: bool = False
    """Problems of the held-out split instead of the training split."""

    seed: int = 0
    """Which problems are drawn."""

    _problems: _arithmetic.Problems = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_limits(self)
        self._problems = _arithmetic.Problems(self.problems, seed=self.seed, levels=self.levels, held_out=self.held_out)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem = self._problems[index]
        prompt = f"{problem.question}\n"
        split = "held-out" if self.held_out else "train"
        return Preview(
            id=f"arithmetic-{split}-{self.seed}:{index}",
            sequences=encode_prompts(self.util.tokenizer, [prompt], chat=False),
            prompt=prompt,
            metadata={"answer": problem.answer, "question": problem.question},
        )

    @staticmethod
    def make_tokenizer() -> PreTrainedTokenizerFast:
        """What `tokenizer: builtin:arithmetic` means."""
        from transformers import PreTrainedTokenizerFast

        backend, special_tokens = Arithmetic.tokenizer_parts()
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens)

    @staticmethod
    def tokenizer_parts() -> tuple[Tokenizer, dict[str, str]]:
        """The same without transformers: what splits texts, and the names of its special tokens."""
        return _arithmetic.tokenizer(), dict(_arithmetic.SPECIAL_TOKENS)
