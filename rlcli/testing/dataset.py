"""The contract of datasets.

    class TestContract(DatasetContract):
        name = "my-dataset"

is a complete test: it builds the dataset many times, from the EXAMPLES rows of its class, from
`rows`, or from the file that `args` name as `path`; datasets that generate their rows need none.
Each byte of a text is one token.
"""

from __future__ import annotations

from rlcli.testing.dataset_checks.arguments import DatasetArgumentChecks
from rlcli.testing.dataset_checks.building import BuildingChecks
from rlcli.testing.dataset_checks.fields import FieldChecks
from rlcli.testing.dataset_checks.files import FileChecks
from rlcli.testing.dataset_checks.final_answers import FinalAnswerChecks
from rlcli.testing.dataset_checks.formats import FormatChecks
from rlcli.testing.dataset_checks.order import OrderChecks
from rlcli.testing.dataset_checks.outlines import OutlineChecks
from rlcli.testing.dataset_checks.passes import PassChecks
from rlcli.testing.dataset_checks.rendering import RenderingChecks
from rlcli.testing.dataset_checks.samples import SampleChecks
from rlcli.testing.dataset_checks.stated import StatedChecks
from rlcli.testing.dataset_checks.texts import TextChecks
from rlcli.testing.dataset_checks.writings import WritingChecks

__all__ = ["DatasetContract"]


class DatasetContract(
    StatedChecks,
    DatasetArgumentChecks,
    WritingChecks,
    FormatChecks,
    FinalAnswerChecks,
    PassChecks,
    FieldChecks,
    FileChecks,
    OrderChecks,
    RenderingChecks,
    OutlineChecks,
    TextChecks,
    SampleChecks,
    BuildingChecks,
):
    """What every dataset must do."""

    kind = "dataset"
