"""The law that every field of a row matters: a dataset that shows a field in its EXAMPLES and then
ignores it trains on something else than what its users see in their files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.testing.arguments import values_like
from rlcli.testing.contract import Contract, Violation, skip_if
from rlcli.testing.dataset_checks.records import records
from rlcli.testing.dataset_checks.trial import Rows, Trial, usual_tokenizer


class FieldChecks(Contract):
    def test_every_field_matters(self, trial: Trial) -> None:
        """every field of the example rows changes a sample"""
        skip_if(
            not trial.rows or trial.given_file or trial.given_rows,
            "not tried: only EXAMPLES have no fields that are for others",
        )
        tokenizer = usual_tokenizer(trial.cls)

        def result(rows: Rows) -> Any:
            """None if the rows are refused, which is an effect as well."""
            samples = trial.accepted(rows, tokenizer=tokenizer)
            return None if samples is None else records(samples)

        expected = records(trial.samples(tokenizer=tokenizer))
        for name in dict.fromkeys(name for row in trial.rows for name in row):
            variants = list(_variants(trial.rows, name))
            if variants and all(result(rows) == expected for rows in variants):
                raise Violation(
                    f"samples are the same whatever is in the field {name} of its rows",
                    f"use {name}, put it into the metadata, or take it out of EXAMPLES",
                    trial.reader,
                )


def _variants(rows: Rows, name: str) -> Iterator[Rows]:
    """The rows with other values in a field, of each kind that its values are."""
    for number, row in enumerate(rows):
        for value in values_like(row.get(name)):
            yield [*rows[:number], {**row, name: value}, *rows[number + 1 :]]
