"""The tiny batches of the checks."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.api.data import SequenceSample
from rlcli.testing.batches import Lengths, make_batch
from rlcli.testing.tiny_models import END, VOCABULARY

LENGTHS = ((2, 3), (4, 7), (1, 2), (3, 5), (2, 7), (3, 0), (1, 0))
"""(prompt, response) of each sequence in a batch, in tokens: ragged, one without a response,
one of a single token."""
GROUPS = (((24, 3), (24, 7), (24, 0)), ((2, 7),), ((17, 5), (17, 2)))
"""The same for groups of sequences with one prompt each, so long that sharing it pays."""
PROMPTS = (5, 9, 3, 17, 1)


def batch(seed: int = 0, lengths: Sequence[tuple[int, int]] = LENGTHS) -> SequenceSample:
    return _texts([[pair] for pair in lengths], seed)


def groups(seed: int = 0) -> SequenceSample:
    """Samples of several sequences that begin alike."""
    return _texts(GROUPS, seed)


def _texts(lengths: Lengths, seed: int) -> SequenceSample:
    keys = ("packed_input_ids", "prompt_mask")
    return make_batch(keys, lengths, seed, vocabulary=VOCABULARY, end=END)


def prompts(lengths: Sequence[int] = PROMPTS) -> SequenceSample:
    pairs = [[(length, 0)] for length in lengths]
    return make_batch(("packed_prompts",), pairs, vocabulary=VOCABULARY, end=END)
