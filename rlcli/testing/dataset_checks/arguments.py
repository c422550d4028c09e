"""Every argument of a dataset matters (`rlcli.testing.effects`), names the column that it should,
and keeps what it writes as it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from rlcli.api.dataset import IteratedRows
from rlcli.api.limits import needs_of
from rlcli.errors import DataError, ModelError
from rlcli.project import is_built_in
from rlcli.testing.arguments import (
    Changes,
    VariedArgument,
    arguments_of,
    check_variants,
    run_each,
    silent_arguments,
)
from rlcli.testing.contract import Contract, Violation, skip_if
from rlcli.testing.dataset_checks.first_rows import FirstRows
from rlcli.testing.dataset_checks.order import OrderChecks
from rlcli.testing.dataset_checks.outlines import OutlineChecks
from rlcli.testing.dataset_checks.records import contents, records
from rlcli.testing.dataset_checks.rendering import RenderingChecks
from rlcli.testing.dataset_checks.samples import SampleChecks
from rlcli.testing.dataset_checks.sequences import decoded, sequences_of, text_of
from rlcli.testing.dataset_checks.texts import SYSTEM, unusual
from rlcli.testing.dataset_checks.trial import (
    Row,
    Trial,
    as_line,
    longest_sequence,
    read,
    usual_tokenizer,
    without,
)
from rlcli.testing.effects import Effects, demand_effects, remembered
from rlcli.testing.tokenizer import MARKED_TEMPLATE, byte_tokenizer

NEW_COLUMN = "column of another name"
SPLITS = ("split", "held_out", "heldout", "holdout", "validation", "evaluation")
"""Names of arguments that choose among disjoint sets of generated rows."""
ROWS_OF_A_SPLIT = 600
"""That are compared with those of the others."""

OF_EVERY_VARIANT: Sequence[Callable[[Any, Trial], None]] = (
    OrderChecks.test_determinism,
    OrderChecks.test_continues,
    OrderChecks.test_any_order,
    OrderChecks.test_no_shared_state,
    SampleChecks.test_samples_are_valid,
    SampleChecks.test_samples_make_a_batch,
    OutlineChecks.check_outlines,
    SampleChecks.test_preview,
    RenderingChecks.test_masks_do_not_depend_on_markers,
)


class DatasetArgumentChecks(Contract):
    def test_every_argument_matters(self, trial: Trial) -> None:
        """every argument changes a sample, unless it is declared to change none"""
        demand_effects(effects_of(trial), trial.cls)

    def test_every_variant(self, trial: Trial) -> None:
        """with each value of each flag and choice, and each number that is off by default, samples
        are valid, and the same in any order"""

        def check(changes: Changes) -> None:
            for tokenizer in (trial.tokenizer, byte_tokenizer(chat=True)):
                args = {**trial.args, **changes}
                variant = dataclasses.replace(trial, args=args, tokenizer=tokenizer)
                if isinstance(_outcome(trial, changes, tokenizer=tokenizer), list):
                    return run_each(OF_EVERY_VARIANT, self, variant)

        effects, silent = effects_of(trial), silent_arguments(trial.cls)
        check_variants(effects.variants(silent), check)
        check_variants(effects.switched_on(silent), check)

    def test_columns_are_found_by_their_names(self, trial: Trial) -> None:
        """an argument that names a column has the dataset read that column"""
        for name, column in _values_of_arguments(trial).items():
            if not name.endswith("_key"):
                continue
            if column is None:
                _demand_that_a_column_is_read(trial, name)
            elif column and any(column in row for row in trial.rows):
                rows = [_renamed(row, column) for row in trial.rows]
                trial.demand_same(
                    trial.samples(),
                    trial.samples(rows, changes={name: NEW_COLUMN}),
                    f"when the column {column} of its rows has another name and {name} is that",
                    f"read the column that {name} names, wherever it is used",
                    trial.reader,
                )

    def test_texts_of_arguments_are_kept_as_written(self, trial: Trial) -> None:
        """an argument whose text is in the tokens is there as written"""
        for name, text in _shown_arguments(trial):
            written = f"{text}{unusual(SYSTEM)}"
            dataset = trial.demand(changes={name: written})
            expected = written if is_built_in(trial.signature.path) else written.strip()
            if expected[len(text) :] not in decoded(dataset, trial.tokenizer):
                raise Violation(
                    f"the argument {name} is {written!r}, which is not in its tokens",
                    "leave it as it is: no strip, format, % or splitlines",
                    trial.reader,
                )

    def test_texts_of_arguments_are_not_in_the_metadata(self, trial: Trial) -> None:
        """metadata that are a field of the row stay so, whatever arguments write around it"""
        usual = trial.samples()
        for name, text in _shown_arguments(trial):
            changed = trial.samples(changes={name: text + SYSTEM})
            for row, before, after in zip(trial.rows, usual, changed, strict=False):
                for field in set(row) & set(before.metadata):
                    if before.metadata[field] == [row[field]] != after.metadata[field]:
                        raise Violation(
                            f"with another {name}, {field} of the metadata is "
                            f"{after.metadata[field][0]!r:.60} and not {row[field]!r:.60}",
                            "put the row's own field into the metadata",
                            trial.reader,
                        )

    def test_splits_share_no_prompt(self, trial: Trial) -> None:
        """the rows of one split are not among those of another"""
        splits = [
            argument
            for argument in arguments_of(_component(trial))
            if argument.is_choice and argument.name in SPLITS
        ]
        skip_if(trial.reads_file or not splits, "generates no splits")
        for argument in splits:
            values = (argument.default, *argument.others)
            prompts = {value: _prompts(trial, {argument.name: value}) for value in values}
            for first, second in combinations(values, 2):
                if shared := sorted(prompts[first] & prompts[second]):
                    text = text_of(trial.tokenizer, shared[0])
                    raise Violation(
                        f"{len(shared)} prompts are in both {argument.name}={first} and "
                        f"{argument.name}={second}, such as {text!r:.60}",
                        "decide by a hash of a row's content to which split it belongs",
                        trial.location,
                    )


def effects_of(trial: Trial) -> Effects:
    """The samples that a dataset makes of its rows in several situations."""
    situations = list(_situations(trial))
    outcomes = remembered(
        lambda changes: [_outcome(trial, changes, **situation) for situation in situations]
    )
    return Effects(
        _arguments(trial),
        needs_of(trial.cls),
        lambda changes: any(outcome is not None for outcome in outcomes(changes)),
        outcomes,
        lambda first, second: first != second,
    )


def _arguments(trial: Trial) -> list[VariedArgument]:
    """Of `max_length`, the first value to try is one that only the longest row exceeds."""
    arguments = arguments_of(_component(trial))
    limit = max(map(longest_sequence, trial.samples())) - 1
    return [
        dataclasses.replace(argument, others=(limit, *argument.others))
        if argument.name == "max_length"
        else argument
        for argument in arguments
    ]


def _situations(trial: Trial) -> Iterator[dict[str, Any]]:
    """How to make the dataset so that some argument shows its effect: with tokenizers, malformed
    rows, and rows that lack a field."""
    usual = usual_tokenizer(trial.cls)
    yield {"tokenizer": byte_tokenizer(chat=True)}
    yield {"tokenizer": byte_tokenizer(chat=True, template=MARKED_TEMPLATE)}
    yield {"tokenizer": byte_tokenizer()}
    lines = [as_line(row) for row in trial.rows]
    if lines:
        yield {"tokenizer": usual, "lines": [lines[0], "{", "[", *lines[1:]]}
    for field in dict.fromkeys(field for row in trial.rows for field in row):
        rows = [without(row, field) for row in trial.rows]
        if all(rows):
            yield {"tokenizer": usual, "rows": rows}


def _outcome(trial: Trial, changes: Changes, **situation: Any) -> Any:
    """The contents of samples, whose ids may name arguments; a text if the rows are refused; None
    if the arguments are."""
    try:
        return contents(read(trial.make(changes=changes, **situation)))
    except (DataError, ModelError) as refusal:
        return refusal.what
    except Exception:  # values that its author did not think of may raise anything
        return None


def _component(trial: Trial) -> Any:
    """The dataset as its class makes it."""
    dataset = trial.demand()
    stream = dataset.stream if isinstance(dataset, FirstRows) else dataset
    return stream.dataset if isinstance(stream, IteratedRows) else stream


def _values_of_arguments(trial: Trial) -> dict[str, Any]:
    """Argument → its value, of those that the dataset keeps."""
    component = _component(trial)
    names = [name for name in trial.argument_names if hasattr(component, name)]
    return {name: getattr(component, name) for name in names}


def _renamed(row: Row, column: str) -> dict[str, Any]:
    return {NEW_COLUMN if name == column else name: value for name, value in row.items()}


def _demand_that_a_column_is_read(trial: Trial, name: str) -> None:
    """Raises Violation if a column that no argument named before changes no sample, whatever it
    holds; some of what it holds may be refused."""
    usual = records(trial.samples())
    accepted = 0
    for content in (_text_for, _numbers_for):
        rows = [{**row, NEW_COLUMN: content(row)} for row in trial.rows]
        samples = trial.accepted(rows, changes={name: NEW_COLUMN})
        if samples is None:
            continue
        accepted += 1
        args = {**trial.args, name: NEW_COLUMN}
        SampleChecks().test_samples_are_valid(
            dataclasses.replace(trial, args=args, given_rows=rows)
        )
        if records(samples) != usual:
            return
    if accepted:
        raise Violation(
            f"samples are the same whatever is in the column that {name} names",
            "use it, or take the argument away",
            trial.reader,
        )


def _text_for(row: Row) -> str:
    return f"What row {len(row)} is about."


def _numbers_for(row: Row) -> list[float]:
    """One for each entry of the row's lists."""
    lists = [value for value in row.values() if isinstance(value, list)]
    return [0.5] * max(map(len, lists), default=1)


def _shown_arguments(trial: Trial) -> Iterator[tuple[str, str]]:
    """(argument, a text for it) of each argument whose text is in the tokens."""
    for name, value in _values_of_arguments(trial).items():
        text = "" if value is None else value
        is_text = isinstance(text, str) and name != trial.file_argument
        if is_text and _shows(trial, name, text + SYSTEM):
            yield name, text


def _shows(trial: Trial, name: str, text: str) -> bool:
    try:
        dataset = trial.make(changes={name: text})
    except Exception:  # not such a text: the name of a file or of a column
        return False
    return SYSTEM in decoded(dataset, trial.tokenizer)


def _prompts(trial: Trial, changes: Changes) -> set[tuple[int, ...]]:
    """The first prompts of its rows with some arguments."""
    dataset = trial.demand(changes=changes)
    prompts: set[tuple[int, ...]] = set()
    for index in range(min(len(dataset), ROWS_OF_A_SPLIT)):
        prompts |= {tuple(sequence.prompt) for sequence in sequences_of(dataset[index])}
    return prompts
