"""The contract of datasets.

    class TestContract(DatasetContract):
        name = "my-dataset"

is a whole test: it builds the dataset many times over, of the rows that its class shows as EXAMPLES, or of `rows`, or
of the file that `args` name as `path`; datasets that make their own rows need none. Each byte of a text is one token.
"""

from __future__ import annotations

from rlcli.testing.dataset_checks.building import BuildingChecks
from rlcli.testing.dataset_checks.files import FileChecks
from rlcli.testing.dataset_checks.order import OrderChecks
from rlcli.testing.dataset_checks.samples import SampleChecks

__all__ = ["DatasetContract"]


class DatasetContract(FileChecks, OrderChecks, SampleChecks, BuildingChecks):
    """What every dataset must do."""

    kind = "dataset"
