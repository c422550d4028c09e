"""Inference of rules, which ask no model, on texts that they may tell apart."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.key_meaning import PROMPT_MASK, REWARDS, SEQUENCES
from rlcli.api.model import Model
from rlcli.testing.contract import skip_unless
from rlcli.testing.interface.actions import with_tensor
from rlcli.testing.interface.inference_trial import CallTrial, batches_with
from rlcli.testing.interface.outputs import sequences, tensor_of
from rlcli.testing.interface.texts import batch_of_texts, texts_for
from rlcli.testing.interface.training_trial import Batches
from rlcli.testing.tokenizer import byte_tokenizer


class RuleTrial(CallTrial):
    """Inference of what asks no model."""

    def model(self, *_: Any, **__: Any) -> Model:
        return Model("tested", NoEngine(), self.tokenizer, torch.device("cpu"))


class NoEngine:
    """Whatever asks it is not tried."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip("not tried: asks its model")


def rule_trial(usual: CallTrial, batches: Batches) -> CallTrial:
    """Rewards of texts that the component's file names, and of some that many rules tell apart; the
    fields of their rows are the usual ones. Skips the check for what gives no rewards of
    responses."""
    read, tokenizer = skip_unless_responses_are_rewarded(usual), byte_tokenizer()
    make_batch = batches_with(read, batches, len(tokenizer))
    batch = batch_of_texts(make_batch, tokenizer, texts_for(type(usual.interface)))
    for name, column in usual.batch.metadata.items():
        batch.metadata[name] = list(islice(cycle(column), batch.bs))
    batch.metadata["batch_index"] = list(range(batch.bs))
    return RuleTrial(usual.make, usual.call, batch, tokenizer)


def skip_unless_responses_are_rewarded(trial: CallTrial) -> DeclaredKeys:
    """The keys that it reads."""
    read, written = trial.interface.reads(trial.call), trial.interface.writes(trial.call)
    if read is None or written is None or REWARDS not in written.needed:
        pytest.skip("gives no rewards")
    skip_unless({SEQUENCES, PROMPT_MASK} <= set(read.needed), "gives no rewards of responses")
    return read


def with_later_beginnings(batch: SequenceSample) -> SequenceSample:
    """The batch, in which the first half of each response counts as its prompt."""
    masks = []
    for mask in sequences(batch, PROMPT_MASK):
        half = len(mask) - int((~mask).sum()) // 2
        masks.append(mask | (torch.arange(len(mask)) < half))
    return with_tensor(batch, PROMPT_MASK, torch.cat(masks))


def with_other_prompts(batch: SequenceSample) -> SequenceSample:
    """The batch, all tokens of whose prompts are the last token of its first prompt."""
    mask, tokens = tensor_of(batch, PROMPT_MASK), tensor_of(batch, SEQUENCES)
    first = int(mask.long().argmin()) - 1
    return with_tensor(batch, SEQUENCES, torch.where(mask, tokens[first], tokens))
