"""Families that misread a configuration are reported with the keys that the fault needs."""

import dataclasses

import pytest

from rlcli.checkpoint.families import family_of
from rlcli.testing.contract import Violation
from rlcli.testing.family_checks.drawn import DrawnConfigurationChecks
from rlcli.testing.family_checks.examples import made_examples


def usual_positions(config, hf):
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, base=1e4))


def one_epsilon(config, hf):
    return dataclasses.replace(config, norm_eps=hf.get("rms_norm_eps", 0.1))


def windows_everywhere(config, hf):
    windows = tuple(size or hf.get("sliding_window") for size in config.windows)
    return dataclasses.replace(config, windows=windows)


@pytest.mark.parametrize(
    ("name", "misread", "keys"),
    [
        ("llama", usual_positions, "with rope_theta="),
        ("llama", one_epsilon, "without rms_norm_eps"),
        ("qwen2", windows_everywhere, "sliding_window"),
    ],
)
def test_a_family_that_misreads_a_key_is_reported(name, misread, keys):
    usual = family_of(name)

    class Misreading(type(usual)):
        def config_from_hf(self, hf):
            return misread(super().config_from_hf(hf), hf)

    with pytest.raises(Violation) as caught:
        DrawnConfigurationChecks().test_any_configuration_is_read(Misreading(), made_examples(name))
    assert keys in caught.value.finding
    assert "logits differ" in caught.value.finding
