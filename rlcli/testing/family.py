"""The contract of model families.

    class TestContract(FamilyContract):
        name = "my-family"

is a complete test if transformers has the family's `architecture`: tiny random models are built
from its configuration, one for every switch in it. Otherwise `make_examples` provides the models to
test the family on:

        def make_examples(self):
            return [Example("small", hf={…}, tensors={…})]
"""

from __future__ import annotations

from rlcli.testing.family_checks.configuration import ConfigurationChecks
from rlcli.testing.family_checks.drawn import DrawnConfigurationChecks
from rlcli.testing.family_checks.examples import Example
from rlcli.testing.family_checks.models import ModelChecks
from rlcli.testing.family_checks.weights import WeightChecks

__all__ = ["Example", "FamilyContract"]


class FamilyContract(WeightChecks, DrawnConfigurationChecks, ConfigurationChecks, ModelChecks):
    """What every family must do. Its `name` is the `model_type` of a config.json."""

    kind = "family"
