"""Settings shared by PPO's actor and critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.declared_keys import Declaration

from ._rollout_settings import GeneralizedAdvantages, RolloutSettings
from ._settings import OptimizerSteps


@dataclass(kw_only=True)
class PPOSettings(OptimizerSteps, GeneralizedAdvantages, RolloutSettings):
    """How advantages and returns are computed from a rollout: actor and critic compute the same ones."""

    READS: ClassVar[Declaration] = {"train_step": (
        "packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask", "solved if given",
        "packed_ref_logprobs if kl_ctl", "values unless disable_value",
        "proximal_logprobs if use_decoupled_loss", "proximal_logprobs if recompute_logprob",
        "dense_rewards if use_dense_reward", "rewards unless use_dense_reward", "rewards if generation_size",
    )}  # fmt: skip

    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2 if group_adv_norm",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_adv_norm and self.generation.responses_per_prompt == 1:
            raise ValueError("group_adv_norm compares responses to one prompt: set generation.responses_per_prompt")
