"""How far the trainer's log-probs are from the sampler's: worked by hand, and only where both are available."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.interfaces._rollout import proximal_gaps
from rlcli.interfaces.grpo import GRPOInterface
from rlcli.ops.reduce import identity


def batch(**metadata):
    """Two responses: of two tokens behind a prompt of two, and of one token behind a prompt of one."""
    mask = torch.tensor([True, True, False, False, True, False])
    behaviour = torch.tensor([-9.0, -1.0, -2.0, -3.0])
    return SequenceSample.from_default(
        ids=["a", "b"], seqlens=[[4], [2]],
        data={
            "packed_input_ids": torch.arange(6), "prompt_mask": mask, "packed_logprobs": behaviour,
            "proximal_logprobs": behaviour + torch.tensor([100.0, 0.5, -0.25, 0.0]),
        },
        metadata=metadata,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{"use_decoupled_loss": True}, {"recompute_logprob": True}])
def test_the_gap_is_the_mean_over_response_tokens(settings):
    assert proximal_gaps(GRPOInterface(**settings), batch(), identity) == {"sampler_gap": 0.25}


def test_samples_of_older_weights_count_as_drift():
    """Only those of the same weights show how the engines differ."""
    recomputed = GRPOInterface(recompute_logprob=True)
    assert proximal_gaps(recomputed, batch(age=[1, 3]), identity) == {"policy_drift": 0.25}
    assert proximal_gaps(recomputed, batch(age=[1, 0]), identity) == {"policy_drift": 0.375, "sampler_gap": 0.0}


def test_no_gap_is_computed_without_log_probs_of_the_trainer():
    assert proximal_gaps(GRPOInterface(), batch(), identity) == {}
