"""The prerequisite of the other checks: a dataset that can be built and indexed by row number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlcli.registry import load
from rlcli.testing.contract import Contract, Violation
from rlcli.testing.dataset_checks.trial import Rows, Trial, usual_tokenizer


class BuildingChecks(Contract):
    """Whether there is anything to check. Last among the bases, so that it is reported first."""

    rows: ClassVar[Rows] = ()
    """Rows for its file; empty: the EXAMPLES of its class."""

    @pytest.fixture
    def tokenizer(self) -> Any:
        return usual_tokenizer(load("datasets", self.name))

    @pytest.fixture
    def trial(self, tmp_path: Path, tokenizer: Any) -> Trial:
        """The dataset, which a check may build as often as it likes."""
        try:
            return self._built(tmp_path, tokenizer)
        except Exception:  # reported by the check for it
            pytest.skip("not tried: it cannot be built")

    def test_can_be_built(self, tmp_path: Path, tokenizer: Any) -> None:
        """it can be built from its rows"""
        self._built(tmp_path, tokenizer)

    def _built(self, folder: Path, tokenizer: Any) -> Trial:
        trial = Trial(self.name, dict(self.args), folder, tokenizer, self.rows)
        lacking = _lacking(type(trial.demand()))
        if lacking:
            raise Violation(
                f"{trial.cls.__name__} has no {' and no '.join(lacking)}",
                (
                    "a run takes rows by number: read the stream into a list, or offer __iter__ or "
                    "rows_from(epoch, start)"
                ),
                trial.location,
            )
        return trial


def _lacking(cls: type) -> list[str]:
    """What a run needs from a dataset but its class lacks."""
    from torch.utils.data import Dataset

    methods = {"len()": getattr(cls, "__len__", None), "[]": getattr(cls, "__getitem__", None)}
    return [words for words, method in methods.items() if method in (None, Dataset.__getitem__)]
