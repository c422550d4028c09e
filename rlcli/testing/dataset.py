"""The contract of datasets.

    class TestContract(DatasetContract):
        name = "my-dataset"

is a whole test: it builds the dataset many times over, of the rows that its class shows as EXAMPLES, or of `rows`, or
of the file that `args` name as `path`; datasets that make their own rows need none. Each byte of a text is one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlcli.testing.dataset_checks.files import FileChecks
from rlcli.testing.dataset_checks.order import OrderChecks
from rlcli.testing.dataset_checks.samples import SampleChecks
from rlcli.testing.dataset_checks.trial import Trial
from rlcli.testing.tokenizer import byte_tokenizer

__all__ = ["DatasetContract"]


class DatasetContract(FileChecks, OrderChecks, SampleChecks):
    """What every dataset must do."""

    kind = "dataset"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Rows for its file; none: the EXAMPLES of its class."""

    @pytest.fixture
    def tokenizer(self) -> Any:
        return byte_tokenizer()

    @pytest.fixture
    def trial(self, tmp_path: Path, tokenizer: Any) -> Trial:
        """The dataset, to be built as often as a check likes."""
        try:
            trial = self._trial(tmp_path, tokenizer)
            trial.make()
        except Exception:  # which one says the check that is about it
            pytest.skip("it cannot be built")
        return trial

    def _trial(self, folder: Path, tokenizer: Any) -> Trial:
        return Trial(self.name, dict(self.args), folder, tokenizer, self.rows)

    def test_can_be_built(self, tmp_path: Path, tokenizer: Any) -> None:
        """it can be built of its rows"""
        self._trial(tmp_path, tokenizer).make()
