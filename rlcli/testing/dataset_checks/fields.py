"""The law that every field of a row matters: a dataset that shows a field in its EXAMPLES and then
ignores it trains on something else than what its users see in their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.errors import RlcliError
from rlcli.testing.contract import Contract, Violation, place_of
from rlcli.testing.dataset_checks.first_rows import reader
from rlcli.testing.dataset_checks.trial import Trial, content_of, id_of, needs_template, read
from rlcli.testing.tokenizer import byte_tokenizer

Rows = list[dict[str, Any]]


class FieldChecks(Contract):
    def test_every_field_matters(self, trial: Trial) -> None:
        """every field of the example rows changes a sample"""
        if not trial.rows or trial.given_file or trial.given_rows:
            pytest.skip("not tried: only EXAMPLES have no fields that are for others")
        tokenizer = byte_tokenizer(chat=needs_template(trial.cls))
        expected = _contents(trial.demand(tokenizer=tokenizer))
        for name in dict.fromkeys(name for row in trial.rows for name in row):
            variants = list(_variants(trial.rows, name))
            if variants and all(_result(trial, rows, tokenizer) == expected for rows in variants):
                raise Violation(
                    f"samples are the same whatever is in the field {name} of its rows",
                    f"use {name}, put it into the metadata, or take it out of EXAMPLES",
                    place_of(reader(trial.demand())),
                )


def _variants(rows: Rows, name: str) -> Iterator[Rows]:
    """The rows with other values in a field, of each kind that its values are."""
    for number, row in enumerate(rows):
        for value in _others(row.get(name)):
            yield [*rows[:number], {**row, name: value}, *rows[number + 1 :]]


def _others(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, str):
        return [f"{value} differently"] if value else []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, list):
        return [
            [*value[:place], changed, *value[place + 1 :]]
            for place, entry in enumerate(value)
            for changed in _others(entry)
        ]
    if isinstance(value, dict):
        return [{**value, key: changed} for key in value for changed in _others(value[key])]
    return []


def _result(trial: Trial, rows: Rows, tokenizer: Any) -> Any:
    """The samples of rows, or None if the dataset refuses them, which is an effect as well."""
    try:
        return _contents(trial.make(rows, tokenizer=tokenizer))
    except RlcliError:
        return None


def _contents(dataset: Sequence[SequenceSample]) -> list[Any]:
    return [(id_of(sample), content_of(sample)) for sample in read(dataset)]
