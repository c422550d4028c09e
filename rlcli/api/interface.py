"""The contract of interfaces. Nothing here imports torch, so a rule that needs none can be tried without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcli.api.component import register_interface
from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample

if TYPE_CHECKING:
    from rlcli.api.model import Model

__all__ = ["EvalLoader", "ModelInterface", "register_interface"]

EvalLoader = Sequence[SequenceSample]
"""Batches for `evaluate`."""


class ModelInterface:
    """What a role does. A dataclass: its fields are the recipe's `args:`.

    A training interface implements `train_step` and `save`, an inference one `inference`, a generation one
    `generate`. `data` holds this rank's samples with the call's input keys; outputs carry the same ids in the
    same order. One that compares the responses to one prompt says how many it needs at least, in its class:
    `NEEDS_GROUP: ClassVar[int] = 2`.
    """

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """Train on one batch; returns stats that are already reduced over ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample | None:
        """Compute output keys from input keys."""
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample | None:
        """Sample responses."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """Numbers on held-out data, reduced over ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not evaluate")

    def save(self, model: Model, save_dir: str) -> None:
        """Write the model as a folder that `transformers` reads. Every rank of the role calls it."""
        raise NotImplementedError(f"{type(self).__name__} does not save")

    def score_texts(self, responses: Sequence[str], answers: Sequence[Any]) -> list[float | None]:
        """The reward of each text as a response to a row with this `answer`; None where it cannot be computed.

        A reward that reads texts may offer it, without a model and without torch: `rlcli check` then tries the
        answers of the rows before anything is trained.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score texts")

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Plausible outputs without running the model, so that a graph can be tested in pieces."""
        raise NotImplementedError(f"{type(self).__name__} has no mock")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state beside the weights, the same on all ranks: KL controllers, value normalisers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, yet was given {sorted(state)}")
