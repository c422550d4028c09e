"""The measurement behind `dtype: auto`."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig

from rlcli.backends._product_speed import NARROW, seconds_by_dtype

CPU = torch.device("cpu")


def config(width):
    return LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_attention_heads=8)


@pytest.mark.parametrize("trains", [True, False])
def test_both_dtypes_are_measured_and_threads_stay_as_they_are(trains):
    threads = torch.get_num_threads()

    seconds = seconds_by_dtype(config(NARROW), CPU, trains)

    assert list(seconds) == ["float32", "bfloat16"]
    assert all(math.isfinite(time) and time > 0 for time in seconds.values())
    assert torch.get_num_threads() == threads


def test_nothing_is_measured_for_narrow_models_or_on_gpus():
    assert seconds_by_dtype(config(NARROW // 2), CPU, trains=True) == {}
    assert seconds_by_dtype(config(NARROW), torch.device("cuda"), trains=True) == {}


def test_a_model_with_a_size_for_each_layer_is_measured_with_usual_ones():
    sizes = {"intermediate_size": [NARROW, 2 * NARROW], "num_attention_heads": [8, 16]}
    uneven = SimpleNamespace(hidden_size=NARROW, num_hidden_layers=2, **sizes)
    uneven.get_text_config = lambda: uneven

    assert list(seconds_by_dtype(uneven, CPU, trains=False)) == ["float32", "bfloat16"]


def test_a_model_whose_layers_have_configurations_of_their_own_is_measured_with_the_first():
    uneven = Gemma4TextConfig(hidden_size=NARROW, intermediate_size=NARROW, head_dim=32)
    assert uneven.is_heterogeneous
    assert list(seconds_by_dtype(uneven, CPU, trains=False)) == ["float32", "bfloat16"]
