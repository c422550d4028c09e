"""Inference and generation of an interface over tiny models with identical initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.interface import ANSWER_FORMS, ModelInterface
from rlcli.api.model import Model, call_interface
from rlcli.testing.arguments import Changes
from rlcli.testing.batches import KEYS, PAIRS, VOCABULARY, DigitTokenizer, Lengths, make_batch
from rlcli.testing.contract import Violation, skip_unless
from rlcli.testing.interface.call_engine import JudgeEngine, ModalEngine
from rlcli.testing.interface.outputs import (
    check_empty,
    check_form,
    check_same,
    check_untouched,
    drops,
    frozen_copy,
)
from rlcli.testing.interface.texts import (
    ANSWERS,
    Gold,
    accepted_form,
    batch_of_rows,
    reads_answers,
    rows_of_answers,
    rows_of_examples,
)
from rlcli.testing.interface.training_trial import (
    WHOLE,
    Batches,
    InterfaceSubject,
    Make,
    in_groups,
    keys_in_source,
    overrides,
    place_of_call,
    untried,
)
from rlcli.testing.tiny_engine import TinyLM, TinyRanks
from rlcli.testing.tokenizer import byte_tokenizer

SEEDS = 10
"""Batches that are tried, where the usual one does not show what a call does."""


class CallTrial:
    """One call of an interface, repeated under different circumstances."""

    def __init__(self, make: Make, call: str, batch: SequenceSample, tokenizer: Any):
        self.make = make
        self.call = call
        self.batch = batch
        """The usual batch, which no check changes."""
        self.tokenizer = tokenizer

    @cached_property
    def interface(self) -> ModelInterface:
        return self.make()

    @cached_property
    def result(self) -> SequenceSample:
        """The result for `batch`, in one micro-batch."""
        return self.run()

    @property
    def takes_batch(self) -> bool:
        """Whether the call declares that a sample's result depends on the others."""
        return self.call in type(self.interface).TAKES_BATCH

    def needs(self, key: str) -> bool:
        """Whether the call needs a key, as far as it declares its keys; else whether there is
        one."""
        declared = self.interface.reads(self.call)
        return key in (self.batch.keys if declared is None else declared.needed)

    @property
    def where(self) -> str:
        return place_of_call(self.interface, self.call)

    def model(self, seed: int = 0, ranks: TinyRanks | None = None, rank: int = 0) -> Model:
        judges = self.call in type(self.interface).GENERATES
        engine_type = JudgeEngine if judges else ModalEngine
        engine = engine_type(TinyLM(vocab=len(self.tokenizer)), 0.1, ranks, rank)
        return Model("tested", engine, self.tokenizer, torch.device("cpu"), seed=seed)

    def run(
        self,
        batch: SequenceSample | None = None,
        spec: MicroBatchSpec = WHOLE,
        model: Model | None = None,
        interface: ModelInterface | None = None,
        changes: Changes = MappingProxyType({}),
    ) -> SequenceSample:
        """The result of the call; by default for the usual batch, from a freshly built model, and
        an interface without an earlier call in its state, with some arguments changed."""
        if interface is None:
            is_used = overrides(self.interface, "state_dict") or changes
            interface = self.make(**changes) if is_used else self.interface
        batch = self.batch if batch is None else batch
        output = call_interface(interface, self.call, model or self.model(), batch, spec)
        if not isinstance(output, SequenceSample):
            raise Violation(
                f"{self.call} returns {type(output).__name__}, not a SequenceSample",
                "return SequenceSample.from_default(ids=data.ids, seqlens=…, data=…)",
                self.where,
            )
        return output

    def check_form(self, output: SequenceSample, ids: list[Hashable]) -> None:
        """Raise Violation unless an output has these samples, with the declared keys."""
        check_form(output, ids, self.interface.writes(self.call), self.where)

    def demand_same(
        self, output: SequenceSample, between: str, cause: str, exact: bool = False
    ) -> None:
        """Raise Violation if an output differs from the usual one."""
        check_same(self.result, output, between, cause, self.where, exact)

    def check_left_alone(self) -> None:
        """Raise Violation unless the call leaves its input and the model as they were, and uses the
        model without dropout."""
        model, before = self.model(), frozen_copy(self.batch)
        self.run(model=model)
        check_untouched(self.batch, before, self.where)
        if model.module.passes_in_training_mode:
            cause = "leave the mode alone: rlcli turns dropout off before the call"
            raise Violation("the model is used in training mode", cause, self.where)
        fresh = dict(self.model().module.model.named_parameters())
        for name, weight in model.module.model.named_parameters():
            if weight.grad is not None or not torch.equal(weight, fresh[name]):
                raise Violation(
                    f"{name} has a gradient or other values after {self.call}",
                    f"{self.call} leaves the model unchanged",
                    self.where,
                )
        if model.version.global_step:
            cause = "only a training step counts, and rlcli counts it"
            raise Violation("the version moved", cause, self.where)

    def check_alone(self, cause: str) -> None:
        """Raise Violation unless each sample gets the same alone."""
        for index in range(self.batch.bs):
            output = self.run(self.batch.select_indices([index]))
            self.demand_same(output, "when it is alone in the batch", cause)

    def check_order(self, cause: str) -> None:
        """Raise Violation unless each sample gets the same in a batch in reverse order."""
        turned = self.batch.reorder(list(reversed(range(self.batch.bs))))
        output = self.run(turned)
        check_form(output, turned.ids, None, self.where)
        self.demand_same(output, "when the batch is reversed", cause)

    def check_no_samples(self) -> None:
        """Raise Violation unless a batch without samples gives the same keys and dtypes."""
        check_empty(self.run(self.batch.select_indices([])), self.result, self.where)

    def mock(self, batch: SequenceSample) -> SequenceSample:
        """The result of the call's mock, for a role without an engine."""
        model = self.model()
        model.module = None
        return self.interface.mock(self.call, model, batch)


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
        skip_unless(reads_answers(interface), "its rows are those of its EXAMPLES")
        form = accepted_form(interface, answers)
        if form is None:
            raise Violation(
                (
                    "score_texts gives a right answer no more than an empty response, in "
                    f"{len(ANSWER_FORMS)} common forms"
                ),
                (
                    "fix it; or, if its rows are of another kind, show some in its class: "
                    'EXAMPLES = ({"row": {…}, "right": "…", "wrong": "…"},)'
                ),
                place_of_call(interface, "score_texts"),
            )
        return lambda answer: form.replace("{answer}", answer)

    @pytest.fixture
    def tokenizer(self, make: Make) -> Any:
        """The role's tokenizer: of digits, or of bytes where texts are scored."""
        interface = make()
        scores_texts = overrides(interface, "score_texts") or interface.EXAMPLES
        return byte_tokenizer() if scores_texts else DigitTokenizer()

    @pytest.fixture
    def inference_batches(
        self, make: Make, batches: Batches, tokenizer: Any, request: pytest.FixtureRequest
    ) -> Batches:
        """Makes batches with the keys that inference reads; texts where texts are scored.

        The interface's own keys come from `batches`; override this if its training has different
        keys.
        """
        interface = make()
        if reads_answers(interface):
            answers, gold = request.getfixturevalue("answers"), request.getfixturevalue("gold")
            return partial(batch_of_rows, tokenizer, rows_of_answers(answers, gold))
        if interface.EXAMPLES:
            return partial(batch_of_rows, tokenizer, rows_of_examples(interface.EXAMPLES))
        return inference_batches_for(interface, batches, tokenizer)

    @pytest.fixture
    def prompt_batches(self, make: Make, batches: Batches) -> Batches:
        """Makes batches with the keys that generation reads; its own keys are handled as in
        `inference_batches`."""
        return batches_with(
            make().reads("generate") or DeclaredKeys(("packed_prompts",), ()), batches
        )

    def demand_batch(
        self, call: str, fixture: str, request: pytest.FixtureRequest, lengths: Lengths = PAIRS
    ) -> None:
        """Raise Violation unless a fixture makes a batch for a call; skips the check where there is
        none for training either, which may lack the same keys."""
        interface = request.getfixturevalue("make")()
        if overrides(interface, "train_step"):
            usual_batch(request.getfixturevalue("batches"))
        make_batch = request.getfixturevalue(fixture)
        try:
            make_batch(lengths)
        except ValueError as error:
            raise untried(self.name, call, fixture, interface, error) from error

    @pytest.fixture
    def inferring(self, make: Make, tokenizer: Any, request: pytest.FixtureRequest) -> CallTrial:
        """Repeated inference."""
        skip_unless(overrides(make(), "inference"), "has no inference")
        return telling_trial(make, request.getfixturevalue("inference_batches"), tokenizer)


def telling_trial(make: Make, batches: Batches, tokenizer: Any) -> CallTrial:
    """Inference of the usual batch; of what drops samples, of one of which it drops some but not
    all, if there is one."""
    usual = CallTrial(make, "inference", usual_batch(batches), tokenizer)
    if not usual.interface.drops("inference"):
        return usual
    drawn = (CallTrial(make, "inference", batches(seed=s), tokenizer) for s in range(1, SEEDS))
    return next((trial for trial in chain([usual], drawn) if _tells_samples_apart(trial)), usual)


def _tells_samples_apart(trial: CallTrial) -> bool:
    reasons = drops(trial.run()).values()
    return any(reasons) and not all(reasons)


def usual_batch(batches: Batches, lengths: Lengths = PAIRS) -> SequenceSample:
    """A batch; skips the check if none can be made, which has its own check."""
    try:
        return batches(lengths)
    except ValueError as error:
        pytest.skip(f"not tried: no batch: {error}")


def batches_with(keys: DeclaredKeys, batches: Batches, vocabulary: int = VOCABULARY) -> Batches:
    """Makes batches with these keys, using the author's `batches` if some required keys are not
    generally known."""
    if {*keys.needed} <= {*KEYS}:
        generally_known = [key for key in keys.all if key in KEYS]
        return partial(make_batch, generally_known, vocabulary=vocabulary)

    def make(lengths: Lengths = PAIRS, seed: int = 0) -> SequenceSample:
        batch = batches(lengths, seed)
        lacking = [key for key in keys.needed if key not in batch.keys]
        if lacking:
            raise ValueError(
                f"the content of {lacking[0]!r} is unknown, and the fixture `batches` does not "
                "make it"
            )
        return batch.select(batch.keys & {*keys.all})

    return make


def inference_batches_for(interface: ModelInterface, batches: Batches, tokenizer: Any) -> Batches:
    """Makes batches with the keys that its inference reads with its arguments, in groups of the
    required size."""
    declared = interface.reads("inference")
    if declared is None:
        keys = dict.fromkeys((*KEYS, *keys_in_source(interface, "inference")))
        declared = DeclaredKeys(tuple(key for key in keys if key != "packed_prompts"), ())
    make_batches = batches_with(declared, batches, vocabulary=len(tokenizer))
    return lambda lengths=PAIRS, seed=0: make_batches(
        in_groups(interface, "inference", lengths), seed
    )
