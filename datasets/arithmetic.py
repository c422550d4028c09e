"""Generated arithmetic problems as prompts: for training and evaluating PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from . import _arithmetic
from ._arithmetic_rows import ArithmeticRows
from ._samples import prompt_sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@register_dataset("arithmetic")
@dataclass(kw_only=True)
class Arithmetic(ArithmeticRows):
    """Sums and differences in symbols and in words;
    the train and held-out splits share no problem."""

    NAME: ClassVar[str] = "arithmetic"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    LONGEST: ClassVar[int] = 40
    """Tokens of the longest prompt at the default levels."""
    VOCABULARY: ClassVar[int] = 380
    """Vocabulary size of the tokenizer that comes with it."""

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        return self._asked(index)

    @staticmethod
    def make_tokenizer() -> PreTrainedTokenizerFast:
        """The tokenizer behind `tokenizer: builtin:arithmetic`."""
        from transformers import PreTrainedTokenizerFast

        backend, special_tokens = Arithmetic.tokenizer_parts()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens
        )

    @staticmethod
    def tokenizer_parts() -> tuple[Tokenizer, dict[str, str]]:
        """The same without transformers: the underlying tokenizer,
        and the names of its special tokens."""
        return _arithmetic.tokenizer(), dict(_arithmetic.SPECIAL_TOKENS)
