"""Checks of single samples: their contents, which tokens are trained on,
and how the dataset describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.preview import preview_of
from rlcli.testing.contract import Contract, Violation, place_of, skip_if, skip_unless
from rlcli.testing.dataset_checks.sequences import (
    TOKENS,
    sequences_of,
    text_of,
)
from rlcli.testing.dataset_checks.texts import texts_of
from rlcli.testing.dataset_checks.trial import (
    Row,
    Trial,
    longest_sequence,
    read,
)

PREFERRED = ("chosen", "positive", "pos_", "preferred", "accepted", "better", "winner")
REJECTED = ("rejected", "negative", "neg_", "worse", "loser")
"""Words in the names of fields that hold the answers of a pair."""

MANY_PAIRS = 16
"""Of a row: all that its few answers make."""


class SampleChecks(Contract):
    """The contents of a sample."""

    def test_registers(self, trial: Trial) -> None:
        """registers under its name, arguments explained"""
        for argument in trial.signature.arguments:
            if not argument.doc:
                raise Violation(
                    f"nothing says what the argument {argument.name} is for",
                    'put a string under it: """What it is, and its unit."""',
                    f"{argument.path}:{argument.line}",
                )
        if not {"KEYS", "KEYS_OF"} & set(trial.signature.constants):
            raise Violation(
                "its class does not say what its samples hold",
                (
                    'write KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",), so that '
                    "recipes can be checked"
                ),
                trial.location,
            )

    def test_samples_are_valid(self, trial: Trial) -> None:
        """a row is one valid sample with the declared keys"""
        dataset = trial.demand()
        declared = trial.keys or set(getattr(dataset, "keys", ()))
        for index, sample in enumerate(read(dataset)):
            if fault := _wrong_sample(sample, declared, len(trial.tokenizer)):
                raise Violation(f"row {index}: {fault}", "", trial.reader)

    def test_samples_make_a_batch(self, trial: Trial) -> None:
        """samples gather into a batch, which can be sent to another process"""
        batch = SequenceSample.gather(trial.samples())
        try:
            arrived = SequenceSample.from_json(json.loads(json.dumps(batch.as_json())))
        except (TypeError, ValueError) as error:
            raise Violation(
                f"a batch cannot be sent to another process: {error}",
                "ids are strings or ints, metadata what JSON can hold",
                trial.reader,
            ) from error
        cause = "metadata are numbers, strings, lists and mappings with string keys"
        sent = batch.unpack()
        trial.demand_same(sent, arrived.unpack(), "sent elsewhere", cause, trial.reader)

    def test_metadata_are_not_always_null(self, trial: Trial) -> None:
        """a field of the metadata says something in some row"""
        samples = trial.samples()
        for name in samples[0].metadata:
            if all(sample.metadata.get(name) == [None] for sample in samples):
                raise Violation(
                    f"{name} of the metadata is null in every row",
                    "fill it from the row, or leave it out",
                    trial.reader,
                )

    def test_preferred_answers_come_first(self, trial: Trial) -> None:
        """of a pair, the first answer is from a field of preferred answers"""
        dataset = trial.demand()
        skip_if(
            "prompt_lens" not in trial.keys or len(dataset) != len(trial.rows),
            "has no pairs of answers from rows",
        )
        for index, (row, sample) in enumerate(zip(trial.rows, read(dataset), strict=True)):
            answers = [text_of(trial.tokenizer, each.answer) for each in sequences_of(sample)]
            misplaced = [
                *_misplaced(answers[::2], _texts_of_fields(row, REJECTED)),
                *_misplaced(answers[1::2], _texts_of_fields(row, PREFERRED)),
            ]
            if misplaced:
                raise Violation(
                    f"row {index}: {misplaced[0]!r:.60} is at the place of the other answer",
                    "the sequences of a sample are the preferred answer, the rejected one, and so "
                    "on",
                    trial.reader,
                )

    def test_no_pair_contradicts_another(self, trial: Trial) -> None:
        """the answers of a pair differ, and no other pair of the row has them in reverse"""
        skip_if("prompt_lens" not in trial.keys, "has no pairs of answers from rows")
        number = trial.signature.constants.get("PAIRS")
        dataset = trial.demand(changes={number: MANY_PAIRS} if number else {})
        for index, sample in enumerate(read(dataset)):
            answers = [tuple(sequence.tokens) for sequence in sequences_of(sample)]
            pairs = set(zip(answers[::2], answers[1::2], strict=True))
            if any((rejected, preferred) in pairs for preferred, rejected in pairs):
                raise Violation(
                    f"row {index}: of two answers, each is preferred to the other, or to itself",
                    "leave out pairs of equal answers or scores; sequences alternate, the "
                    "preferred answer first",
                    trial.reader,
                )

    def test_preview(self, trial: Trial) -> None:
        """the preview says what the sample holds"""
        dataset = trial.demand()
        skip_unless(hasattr(dataset, "preview"), "has no preview of rows by their number")
        for index, sample in enumerate(read(dataset)):
            preview, holds = dataset.preview(index), preview_of(sample)
            for field in ("id", "sequences", "trained", "metadata"):
                if _plain(getattr(preview, field)) != _plain(getattr(holds, field)):
                    raise Violation(
                        f"row {index}: {field} is {getattr(preview, field)!s:.40}, the sample has "
                        f"{getattr(holds, field)!s:.40}",
                        "make the sample from the preview, so that the two cannot differ",
                        place_of(type(dataset).preview),
                    )

    def test_places(self, trial: Trial) -> None:
        """the preview gives each row's file and line"""
        rows = trial.named_rows
        dataset = trial.demand(rows)
        skip_if(not rows or not hasattr(dataset, "preview"), "has no preview of a file")
        ids = {f"{trial.file}:{line}": str(row.get("id")) for line, row in enumerate(rows, 1)}
        for index in range(len(dataset)):
            preview = dataset.preview(index)
            id_there = ids.get(preview.where)
            if id_there is None or (trial.goes_by_ids and id_there != preview.id):
                raise Violation(
                    (
                        f"row {index}, {preview.id}, is said to stand at "
                        f"{preview.where}, but is not there"
                    ),
                    "keep the line that each row was read from, counted from 1",
                    place_of(type(dataset).preview),
                )

    def test_survey(self, trial: Trial) -> None:
        """the survey knows every row and its length"""
        dataset = trial.demand()
        skip_unless(hasattr(dataset, "survey"), "has no survey")
        survey, samples = dataset.survey(), read(dataset)
        expected: dict[str, list[Any]] = {"lengths": [*map(longest_sequence, samples)]}
        if hasattr(dataset, "preview"):
            previews = [dataset.preview(index) for index in range(len(samples))]
            expected["prompts"] = [(preview.where, preview.prompt) for preview in previews]
        for name, values in expected.items():
            surveyed = list(getattr(survey, name))[: len(values)]
            if surveyed != values:
                raise Violation(
                    f"its {name} are {surveyed!s:.60}, those of its rows {values!s:.60}",
                    "count prompt and answer together, of several answers the longest; give "
                    "(where, prompt) of every row, as the preview does",
                    place_of(type(dataset).survey),
                )


def _texts_of_fields(row: Row, words: Sequence[str]) -> list[str]:
    """The texts in fields whose name contains one of the words."""
    values = [value for name, value in row.items() if any(word in name.lower() for word in words)]
    return [text for value in values for text in texts_of(value)]


def _misplaced(answers: Sequence[str], others: Sequence[str]) -> list[str]:
    return [answer for answer in answers if answer.strip() and answer in others]


def _wrong_sample(sample: Any, declared: set[str], vocabulary: int) -> str:
    """What is wrong with a row's sample; empty if nothing is."""
    if not isinstance(sample, SequenceSample):
        return f"a {type(sample).__name__}, not a SequenceSample"
    if sample.bs != 1:
        return f"a batch of {sample.bs} samples; a row is one"
    if set(sample.keys) != declared:
        return f"it holds {', '.join(sample.keys)}; KEYS are {', '.join(sorted(declared))}"
    of_columns = (_wrong_column(sample, key, vocabulary) for key in sample.keys)
    return next(filter(None, of_columns), "") or _contradiction(sample)


def _wrong_column(sample: SequenceSample, key: str, vocabulary: int) -> str:
    import torch

    tensor = (sample.data or {}).get(key)
    if tensor is None:
        return f"{key} has no data"
    if tensor.device.type != "cpu":
        return f"{key} is on {tensor.device}; a run moves rows where they are needed"
    if not all(sample.flat_seqlens(key)):
        return f"{key} has a sequence without tokens"
    if key == "prompt_mask" and tensor.dtype != torch.bool:
        return f"{key} is of {tensor.dtype}; a mask is torch.bool"
    if key not in TOKENS:
        return ""
    if tensor.dtype != torch.int64:
        return f"{key} is of {tensor.dtype}; token ids are torch.int64"
    lowest, highest = int(tensor.min()), int(tensor.max())
    if lowest < 0 or highest >= vocabulary:
        return f"{key} has tokens from {lowest} to {highest}; the vocabulary has {vocabulary}"
    return ""


def _contradiction(sample: SequenceSample) -> str:
    """How the mask of prompts differs from their lengths, where a row has both, or margins are at
    the wrong answer."""
    data = sample.data or {}
    if {"prompt_mask", "prompt_lens"} <= sample.keys:
        marked = [[*flags].count(False) for flags in preview_of(sample).trained or ()]
        lengths = data["prompt_lens"].tolist()
        if set(marked) != set(lengths):
            return f"prompt_lens is {lengths}; prompt_mask marks {marked} tokens"
    margins = data.get("margins")
    if margins is not None and margins[1::2].any():
        return f"margins is {margins.tolist()}; that of a rejected answer is 0"
    return ""


def _plain(value: Any) -> Any:
    """Sequences as lists and mappings as dicts, to compare their contents."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dict(value) if hasattr(value, "items") else value
