"""The check of what SAMPLES states: there alone a dataset says what a row should become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.testing.contract import Contract, Violation, skip_if, skip_unless
from rlcli.testing.dataset_checks.sequences import sequences_of, text_of
from rlcli.testing.dataset_checks.trial import Trial

Statement = Mapping[str, Any]
"""`prompt`, `answers`, `metadata` and other keys of a sample, as far as they are stated."""

FORM = 'write SAMPLES = ({"prompt": "…", "answers": ["…"], "metadata": {…}},)'
CORRECT = "correct the dataset, or what its SAMPLES state"


class StatedChecks(Contract):
    def test_examples_become_the_stated_samples(self, trial: Trial) -> None:
        """EXAMPLES become the samples that SAMPLES states"""
        statements = _statements(trial.cls)
        skip_unless(statements, f"not tried: states no samples: {FORM}")
        skip_if(
            trial.args or trial.given_rows,
            "SAMPLES states what EXAMPLES become with default arguments",
        )
        samples = trial.samples()
        for number, (statement, sample) in enumerate(zip_longest(statements, samples), 1):
            if statement is None:
                return
            if sample is None:
                message = f"EXAMPLES become {len(samples)} samples, SAMPLES states more"
                raise Violation(message, CORRECT, trial.location)
            _demand_as_stated(trial, number, statement, sample)


def _statements(cls: type) -> Sequence[Statement]:
    """SAMPLES, unless a subclass has replaced the EXAMPLES that they are about."""
    for base in cls.__mro__:
        if not vars(base).keys().isdisjoint({"SAMPLES", "EXAMPLES"}):
            return vars(base).get("SAMPLES", ())
    return ()


def _demand_as_stated(
    trial: Trial, number: int, statement: Statement, sample: SequenceSample
) -> None:
    """Raise Violation if a sample is not what is stated, or a name in the statement means
    nothing."""
    content = _content(sample, trial.tokenizer)
    if unknown := statement.keys() - content.keys() - {"metadata"}:
        raise Violation(f"SAMPLES states {', '.join(sorted(unknown))}", FORM, trial.location)
    for name, stated in _flat(statement).items():
        if stated != content.get(name):
            message = (
                f"{name} of sample {number} is {content.get(name)!r}, not {stated!r} as stated"
            )
            raise Violation(message, CORRECT, trial.location)


def _flat(statement: Statement) -> dict[str, Any]:
    """Its entries, and those of the metadata under names of their own."""
    metadata = statement.get("metadata", {})
    entries = {name: value for name, value in statement.items() if name != "metadata"}
    return entries | {f"{name} in the metadata": value for name, value in metadata.items()}


def _content(sample: SequenceSample, tokenizer: Any) -> dict[str, Any]:
    """The numbers of all keys of a sample, its prompt, its answers and its metadata."""
    sequences = sequences_of(sample)
    content = {key: tensor.tolist() for key, tensor in sample.data.items()}
    content["prompt"] = text_of(tokenizer, sequences[0].prompt) if sequences else ""
    answered = [sequence for sequence in sequences if sequence.is_answered]
    content["answers"] = [text_of(tokenizer, sequence.answer) for sequence in answered]
    content["metadata"] = {name: values[0] for name, values in sample.metadata.items()}
    return _flat(content)
