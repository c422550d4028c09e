"""Arguments of the verbs that use a model: the model and its sampling settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.api.config import GenerationHyperparameters
    from rlcli.launch.answering import Answerer
    from rlcli.launch.trained_model import TrainedModel

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL_OR_RUN", help="A model's folder or Hub id, or a run or checkpoint of ours.")
]
RoleName = Annotated[
    str | None, typer.Option("--role", metavar="ROLE", help="Which model of a run; default: its actor.")
]
StepNumber = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Which checkpoint of a run; default: the newest.")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Maximum length of a response, in tokens.")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, metavar="T", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, metavar="P", help="Probability to sample from.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed of the responses.")]


def sampling(max_new_tokens: int, temperature: float, top_p: float, samples: int = 1) -> GenerationHyperparameters:
    """The generation settings that the options describe. Raises UsageError."""
    from rlcli.api.config import GenerationHyperparameters

    try:
        return GenerationHyperparameters(
            responses_per_prompt=samples, max_new_tokens=max_new_tokens, top_p=top_p, greedy=temperature == 0,
            temperature=temperature or 1.0,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextmanager
def answering(model: str, role: str | None, step: int | None, seed: int) -> Iterator[tuple[TrainedModel, Answerer]]:
    """The named model, and an answerer with it. Raises UsageError, ModelError, ResourceError."""
    from rlcli.launch.answering import Answerer
    from rlcli.launch.trained_model import trained_model
    from rlcli.observe.status_line import status_line

    with trained_model(model, role, step) as found:
        with status_line() as say:
            say("loading the model")
            answerer = Answerer(found.source, seed=seed)
        yield found, answerer
