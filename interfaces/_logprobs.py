"""Log-probs of given sequences under a model's current weights."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ROUTED_EXPERTS
from rlcli.api.model import MicroBatchSpec, Model, ModelOutput
from rlcli.ops.packing import action_mask


def recompute_logprobs(
    model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, key: str, temperature: float
) -> SequenceSample:
    """A sample with `key`: [T - N] float32 log-probs of the logits divided by `temperature`.

    0 on prompt positions where the data marks them (`prompt_mask`). Tokens are routed to the
    `routed_experts` of the data, if it has them.
    """

    def logprobs(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        output.temperature = temperature
        if "prompt_mask" in batch.keys:
            lengths = batch.flat_seqlens("packed_input_ids")
            output.actions = action_mask(batch.data["prompt_mask"], lengths)
        return output.logprobs

    seqlens = [[length - 1 for length in lengths] for lengths in data.seqlens["packed_input_ids"]]
    tokens = data.select({"packed_input_ids", "prompt_mask", ROUTED_EXPERTS} & data.keys)
    scores = model.module.forward(
        tokens, mb_spec, post_hook=logprobs, output_seqlens=seqlens, cut="sequence"
    ).float()
    return as_logprobs(data, key, scores)


def as_logprobs(data: SequenceSample, key: str, scores: torch.Tensor) -> SequenceSample:
    """A sample with `key`: `scores` [T - N], 0 on prompt positions where the data marks them."""
    seqlens = [[length - 1 for length in lengths] for lengths in data.seqlens["packed_input_ids"]]
    if "prompt_mask" in data.keys:
        response = action_mask(data.data["prompt_mask"], data.flat_seqlens("packed_input_ids"))
        scores = torch.where(response.to(scores.device), scores, 0.0)
    return SequenceSample.from_default(ids=data.ids, seqlens={key: seqlens}, data={key: scores})
