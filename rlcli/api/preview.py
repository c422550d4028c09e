"""Rows of a dataset in plain Python: what samples are made from, readable without torch.

In addition to `__getitem__`, a dataset may offer two methods, `preview(index) -> Preview` and
`survey() -> Survey`, and a property `notes`, lines that `rlcli check` prints. With a preview, it
promises to use no more of its tokenizer than `rlcli.checkpoint.light_tokenizer` offers: token ids
of texts and the characters they stand for, the chat template, the ids of special tokens. `rlcli
check` and `rlcli tokens` use them; datasets without them also work, but slower.

A class that draws its rows at random, one after another, may declare it: `DRAWN: ClassVar[bool] =
True`. Its first rows are then as good a sample as any, and the cheapest,
so `rlcli check` reads those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcli.errors import DataError

if TYPE_CHECKING:
    from rlcli.api.data import SequenceSample


@dataclass(frozen=True, kw_only=True)
class Preview:
    """One row: a prompt that needs a response, or sequences with the tokens that are trained on."""

    id: str
    """The id of the row's sample."""
    where: str | None = None
    """`path:line`, if the row comes from a file."""
    sequences: Sequence[list[int]]
    """Token ids: of the prompt alone, or of the prompt with each of its answers."""
    trained: Sequence[list[bool]] | None = None
    """For each token of each sequence, whether it is trained on. None:
    a response follows the prompt."""
    prompt: str | None = None
    """The prompt's text, before a template or a system prompt is added."""
    system: str | None = None
    """The system prompt."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The prompt as the chat template gets it, if that is more than these two."""
    answers: Sequence[str] = ()
    """The text of the answer that each sequence ends with."""
    chat: bool = False
    """Whether the tokenizer's chat template wrote the prompt."""
    masked_by: str | None = None
    """What determines which tokens are trained on, if the row's fields do not: the template's
    markers, for example."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The sample's metadata, such as the `answer` that a reward compares a response with."""

    @classmethod
    def answered(
        cls, prompt_tokens: list[int], answer_tokens: Sequence[list[int]], **row: Any
    ) -> Preview:
        """A prompt with one or several answers; the answers are trained on."""
        return cls(
            sequences=[[*prompt_tokens, *answer] for answer in answer_tokens],
            trained=[
                [False] * len(prompt_tokens) + [True] * len(answer) for answer in answer_tokens
            ],
            **row,
        )


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a dataset knows about all its rows, including those that it leaves out."""

    lengths: Sequence[int]
    """Tokens of every row that could be read, before any is dropped or cut;
    with several answers, of the longest."""
    prompts: Sequence[tuple[str, str]]
    """(location, text of the prompt) of every row that could be read."""
    max_length: int
    """Longer rows are dropped, cut or refused."""
    overlong: str
    """What happens to them: the dataset's `overlong`."""
    bad_rows: Sequence[str] = ()
    """`path:line: what is wrong` of every row that could not be read."""

    @property
    def too_long(self) -> int:
        """How many rows are longer than `max_length`."""
        return sum(length > self.max_length for length in self.lengths)


def preview_of(sample: SequenceSample) -> Preview:
    """A preview made from a row's sample, for datasets without previews of their own.
    Raises DataError."""
    if sample.bs != 1:
        raise DataError(f"a row is a batch of {sample.bs} samples; it must be one")
    about: dict[str, Any] = {
        "id": str(sample.ids[0]),
        "metadata": {name: values[0] for name, values in sample.metadata.items()},
    }
    if "packed_prompts" in sample.keys:
        return Preview(sequences=_pieces(sample, "packed_prompts"), **about)
    if "packed_input_ids" not in sample.keys:
        raise DataError(
            f"a row has neither packed_prompts nor packed_input_ids, but {', '.join(sample.keys)}"
        )
    sequences = _pieces(sample, "packed_input_ids")
    if "prompt_mask" in sample.keys:
        masks = _pieces(sample, "prompt_mask")
        return Preview(
            sequences=sequences,
            trained=[[not masked for masked in mask] for mask in masks],
            **about,
        )
    prompt = _pieces(sample, "prompt_lens")[0][0] if "prompt_lens" in sample.keys else 0
    trained = [[index >= prompt for index in range(len(tokens))] for tokens in sequences]
    return Preview(sequences=sequences, trained=trained, **about)


def _pieces(sample: SequenceSample, key: str) -> list[list[Any]]:
    tensor = (sample.data or {}).get(key)
    if tensor is None:
        raise DataError(f"a row holds no data for {key}")
    return [piece.tolist() for piece in tensor.split(sample.flat_seqlens(key))]
