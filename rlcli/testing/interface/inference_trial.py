"""Inference and generation of an interface over tiny models with identical initial weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from rlcli.api.config import MicroBatchSpec, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.interface import ANSWER_FORMS, ModelInterface
from rlcli.api.model import Model, ModelOutput, call_interface
from rlcli.testing.batches import KEYS, PAIRS, VOCABULARY, DigitTokenizer, Lengths, make_batch
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.texts import ANSWERS, text_batch
from rlcli.testing.interface.training_trial import (
    WHOLE,
    Batches,
    InterfaceSubject,
    Make,
    in_groups,
    keys_in_source,
    overrides,
)
from rlcli.testing.tiny_engine import TinyEngine, TinyLM, TinyRanks
from rlcli.testing.tokenizer import byte_tokenizer

T = TypeVar("T")

Gold = Callable[[str], str]
"""A row's answer → the text of a correct response to it."""


class ModalEngine(TinyEngine):
    """A `TinyEngine` that is in training mode until switched, and counts the passes made in it."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.is_training = True
        self.passes_in_training_mode = 0

    def train(self, mode: bool = True) -> None:
        self.is_training = mode

    def forward_micro_batch(
        self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]
    ) -> T:
        self.passes_in_training_mode += self.is_training
        return super().forward_micro_batch(micro_batch, then)

    def generate(self, *args: Any, **settings: Any) -> Any:
        self.passes_in_training_mode += self.is_training
        return super().generate(*args, **settings)


class CallTrial:
    """One call of an interface, repeated under different circumstances."""

    def __init__(self, make: Make, call: str, batch: SequenceSample, tokenizer: Any):
        self.make = make
        self.call = call
        self.batch = batch
        """The usual batch, which no check changes."""
        self.tokenizer = tokenizer

    @functools.cached_property
    def interface(self) -> ModelInterface:
        return self.make()

    @functools.cached_property
    def result(self) -> SequenceSample:
        """The result for `batch`, in one micro-batch."""
        return self.run(self.batch)

    @property
    def takes_batch(self) -> bool:
        """Whether the call declares that a sample's result depends on the others."""
        return self.call in type(self.interface).TAKES_BATCH

    @property
    def where(self) -> str:
        return place_of(getattr(type(self.interface), self.call))

    def model(self, seed: int = 0, ranks: TinyRanks | None = None, rank: int = 0) -> Model:
        engine = ModalEngine(TinyLM(vocab=len(self.tokenizer)), 0.1, ranks, rank)
        return Model("tested", engine, self.tokenizer, torch.device("cpu"), seed=seed)

    def run(
        self,
        batch: SequenceSample,
        spec: MicroBatchSpec = WHOLE,
        model: Model | None = None,
        interface: ModelInterface | None = None,
    ) -> SequenceSample:
        """The result of the call; by default from a freshly built model, and an interface without
        an earlier call in its state."""
        if interface is None:
            interface = self.make() if overrides(self.interface, "state_dict") else self.interface
        output = call_interface(interface, self.call, model or self.model(), batch, spec)
        if not isinstance(output, SequenceSample):
            raise Violation(
                f"{self.call} returns {type(output).__name__}, not a SequenceSample",
                "return SequenceSample.from_default(ids=data.ids, seqlens=…, data=…)",
                self.where,
            )
        return output

    def check_left_alone(self, model: Model) -> None:
        """Raise Violation unless a model that was used has the weights of a new one, no gradients
        and no later version."""
        fresh = dict(self.model().module.model.named_parameters())
        for name, weight in model.module.model.named_parameters():
            if weight.grad is not None or not torch.equal(weight, fresh[name]):
                finding = "a gradient" if weight.grad is not None else "other values"
                raise Violation(
                    f"{name} has {finding} after {self.call}",
                    f"{self.call} leaves the model unchanged",
                    self.where,
                )
        if model.version.global_step:
            cause = "only a training step counts, and rlcli counts it"
            raise Violation("the version moved", cause, self.where)

    def mock(self, batch: SequenceSample, seed: int = 0) -> SequenceSample:
        """The result of the call's mock, for a role without an engine."""
        model = self.model(seed)
        model.module = None
        return self.interface.mock(self.call, model, batch)


def own_logprobs(engine: TinyEngine, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T - 1] for one sequence, computed from only the model's two matrices and a loop."""
    with torch.no_grad():
        hidden = engine.model(tokens, [len(tokens)])
        logits = hidden @ engine.model.head.T / temperature
    chosen = [logits[i].log_softmax(-1)[tokens[i + 1]] for i in range(len(tokens) - 1)]
    return torch.stack(chosen) if chosen else torch.zeros(0)


def with_temperature(
    make: Make, interface: ModelInterface, temperature: float
) -> ModelInterface | None:
    """The interface with another temperature; None if it has none."""
    if hasattr(interface, "temperature"):
        return make(temperature=temperature)
    generation = getattr(interface, "generation", None)
    if generation is None:
        return None
    return make(
        generation=dataclasses.asdict(dataclasses.replace(generation, temperature=temperature))
    )


def accepted_form(interface: ModelInterface, answers: Sequence[str]) -> str | None:
    """The form in which a reward accepts most gold answers; None if it accepts none in any form."""
    nothing = interface.score_texts([""] * len(answers), answers)

    def accepted(form: str) -> int:
        scores = interface.score_texts(
            [form.replace("{answer}", answer) for answer in answers], answers
        )
        return sum(
            s is not None and s > (0 if n is None else n)
            for s, n in zip(scores, nothing, strict=True)
        )

    counts = {form: accepted(form) for form in ANSWER_FORMS}
    best = max(counts, key=lambda form: counts[form])
    return best if counts[best] else None


class CallSubject(InterfaceSubject):
    """The inputs of the inference and generation checks; a subclass may override any of them."""

    @pytest.fixture
    def answers(self) -> Sequence[str]:
        """Values of `answer` in a reward's rows, all different;
        override for a reward that expects others."""
        return ANSWERS

    @pytest.fixture
    def gold(self, make: Make, answers: Sequence[str]) -> Gold:
        """A correct response to a row with this answer; by default in the common form accepted most
        often."""
        interface = make()
        form = accepted_form(interface, answers)
        if form is None:
            raise Violation(
                (
                    "score_texts gives a right answer no more than an empty response, in "
                    f"{len(ANSWER_FORMS)} common forms"
                ),
                (
                    "fix it; or, if its rows are of another kind, give your TestContract the "
                    "fixtures `answers`, with what they hold, and `gold`, with what a correct "
                    "response looks like"
                ),
                place_of(type(interface).score_texts),
            )
        return lambda answer: form.replace("{answer}", answer)

    @pytest.fixture
    def tokenizer(self, make: Make) -> Any:
        """The role's tokenizer: of digits, or of bytes where texts are scored."""
        return byte_tokenizer() if overrides(make(), "score_texts") else DigitTokenizer()

    @pytest.fixture
    def inference_batches(
        self, make: Make, batches: Batches, tokenizer: Any, request: pytest.FixtureRequest
    ) -> Batches:
        """Makes batches with the keys that inference reads; texts where texts are scored.

        The interface's own keys come from `batches`; override this if its training has different
        keys.
        """
        interface = make()
        if overrides(interface, "score_texts"):
            answers, gold = request.getfixturevalue("answers"), request.getfixturevalue("gold")
            return lambda lengths=PAIRS, seed=0: _scored_texts(
                tokenizer, answers, gold, lengths, seed
            )
        declared = interface.reads("inference")
        if declared is None:
            keys = dict.fromkeys((*KEYS, *keys_in_source(interface, "inference")))
            declared = DeclaredKeys(tuple(key for key in keys if key != "packed_prompts"), ())
        make_batches = batches_with(declared, batches, vocabulary=len(tokenizer))
        return lambda lengths=PAIRS, seed=0: make_batches(
            in_groups(interface, "inference", lengths), seed
        )

    @pytest.fixture
    def prompt_batches(self, make: Make, batches: Batches) -> Batches:
        """Makes batches with the keys that generation reads; its own keys are handled as in
        `inference_batches`."""
        return batches_with(
            make().reads("generate") or DeclaredKeys(("packed_prompts",), ()), batches
        )

    @pytest.fixture
    def inferring(self, make: Make, tokenizer: Any, request: pytest.FixtureRequest) -> CallTrial:
        """Repeated inference."""
        if not overrides(make(), "inference"):
            pytest.skip("has no inference")
        batches = request.getfixturevalue("inference_batches")
        return CallTrial(make, "inference", usual_batch(batches), tokenizer)


def usual_batch(batches: Batches, lengths: Lengths = PAIRS) -> SequenceSample:
    """A batch; skips the check if none can be made, which has its own check."""
    try:
        return batches(lengths)
    except ValueError as error:
        pytest.skip(f"not tried: no batch: {error}")


def batches_with(keys: DeclaredKeys, batches: Batches, vocabulary: int = VOCABULARY) -> Batches:
    """Makes batches with these keys, using the author's `batches` if some required keys are not
    generally known."""
    unknown = [key for key in keys.needed if key not in KEYS]
    generally_known = [key for key in keys.all if key in KEYS]

    def make(lengths: Lengths = PAIRS, seed: int = 0) -> SequenceSample:
        if not unknown:
            return make_batch(generally_known, lengths, seed, vocabulary=vocabulary)
        authors_batch = batches(lengths, seed)
        lacking = [key for key in keys.needed if key not in authors_batch.keys]
        if lacking:
            raise ValueError(
                f"the content of {unknown[0]!r} is unknown, and the fixture "
                f"`batches` has no {lacking[0]}"
            )
        return authors_batch.select(key for key in keys.all if key in authors_batch.keys)

    return make


def _scored_texts(
    tokenizer: Any, answers: Sequence[str], gold: Gold, lengths: Lengths, seed: int
) -> SequenceSample:
    """Alternating correct and wrong responses, and some without an answer; text in a prompt is
    never an answer."""
    rows, expected, number = [], [], seed
    for sample, group in enumerate(lengths):
        answer, other_answer = answers[sample % len(answers)], answers[(sample + 1) % len(answers)]
        choices = (gold(answer), gold(other_answer), "", "No idea.")
        responses = []
        for _, response_length in group:
            pick = stable_seed("text", seed, number) % 4 if response_length else 2
            responses.append(choices[pick])
            number += 1
        rows.append((f"Is it {gold(answer)} or not?\n", responses))
        expected.append(answer)
    return text_batch(tokenizer, rows, expected)
