"""Several rewards added up: numbers worked by hand, its recipe, and errors in it."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import RecipeError, UsageError
from rlcli.interfaces.rewards.weighted_sum import WeightedSumInterface
from rlcli.recipe.resolve import load_recipe
from rlcli.testing.batches import PAIRS, DigitTokenizer, make_batch
from rlcli.testing.interface import InterfaceContract

ROLE = Model("reward", None, DigitTokenizer(), torch.device("cpu"))
SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "weighted_sum"
    args = {"weights": {"correct": 1.0, "brevity": -0.5, "rewards": 1e-3}}

    @pytest.fixture
    def inference_batches(self):
        def make(lengths=PAIRS, seed=0):
            batch = make_batch(["packed_input_ids", "rewards"], lengths, seed)
            ones = [[1] * len(group) for group in lengths]
            numbers = make_batch(["rewards"], lengths, seed + 1).data["rewards"]
            data = {"correct": numbers, "brevity": 2 * numbers.roll(1) + batch.data["rewards"]}
            batch.update_(
                SequenceSample.from_default(
                    ids=batch.ids, seqlens=dict.fromkeys(data, ones), data=data
                )
            )
            return batch

        return make


def batch(**keys):
    """Two responses to the first prompt, one to the second, none to the third."""
    data = {key: torch.tensor(values, dtype=torch.float32) for key, values in keys.items()}
    return SequenceSample.from_default(
        ids=["a", "b", "c"],
        seqlens={key: [[1, 1], [1], []] for key in keys},
        data=data,
        metadata={},
    )


def test_a_weighted_sum_equals_that_worked_by_hand():
    interface = WeightedSumInterface(weights={"correct": 2.0, "brevity": -0.5})
    out = interface.inference(
        ROLE, batch(correct=[1, 0, 1], brevity=[-3, 5, 4], other=[9, 9, 9]), SPEC
    )
    assert out.data["rewards"].tolist() == [3.5, -2.5, 0.0]
    assert out.data["rewards"].dtype == torch.float32
    assert out.seqlens["rewards"] == [[1, 1], [1], []]
    assert out.metadata == {}, "each reward is reported by its own call"


def test_each_reward_can_be_normalised_in_its_group_first():
    """Of 1, 0 and -3, 5: ± 1/√2 each, whatever their spreads. One response alone has nothing to be
    compared with."""
    interface = WeightedSumInterface(weights={"correct": 2.0, "brevity": 0.5}, group_norm=True)
    out = interface.inference(ROLE, batch(correct=[1, 0, 1], brevity=[-3, 5, 4]), SPEC)
    a = 1.5 / 2**0.5
    assert out.data["rewards"].tolist() == pytest.approx([a, -a, 0.0], abs=1e-5)


def test_boolean_rewards_are_added_as_numbers():
    data = batch(solved=[0, 1, 1])
    data.data["solved"] = data.data["solved"].bool()
    data.dtypes["solved"] = torch.bool
    assert WeightedSumInterface(weights={"solved": 0.25}).inference(ROLE, data, SPEC).data[
        "rewards"
    ].tolist() == [
        0.0,
        0.25,
        0.25,
    ]


def test_a_small_reward_is_not_lost_next_to_a_large_one():
    """The sum is rounded to float32 once."""
    data = batch(large=[2**24] * 3, one=[1] * 3)
    out = WeightedSumInterface(weights={"large": 1.0, "one": 1.0}).inference(ROLE, data, SPEC)
    negative = WeightedSumInterface(weights={"large": 1.0, "one": 1.0, "minus": -1.0})
    data.update_(batch(minus=[2**24] * 3))
    assert out.data["rewards"].tolist() == [2.0**24] * 3
    assert negative.inference(ROLE, data, SPEC).data["rewards"].tolist() == [1.0] * 3


def test_keys_without_one_number_per_response_are_refused():
    values = make_batch(["values"], [[(2, 3)]])
    with pytest.raises(UsageError, match="values holds more than one number for a response"):
        WeightedSumInterface(weights={"values": 1.0}).inference(ROLE, values, SPEC)
    values.update_(make_batch(["rewards"], [[(2, 3)]]))
    with pytest.raises(UsageError, match="rewards and values do not belong to the same responses"):
        WeightedSumInterface(weights={"rewards": 1.0, "values": 1.0}).inference(ROLE, values, SPEC)


@pytest.mark.parametrize("weights", [{}, {"a": float("nan")}, {"a": float("inf")}])
def test_invalid_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        WeightedSumInterface(weights=weights)


LAYER = """\
extends: ppo_math
graph:
  reward_inf: {output_key_remap: {rewards: strict}}
  lenient_inf:
    {model: reward, call: inference, interface: {type: math_reward, args: {last_number: true}},
     outputs: [rewards], output_key_remap: {rewards: lenient}}
  sum_inf:
    model: reward
    call: inference
    interface:
      type: weighted_sum
      args: {weights: {strict: 1.0, lenient: 0.25}}
"""


def test_the_keys_of_a_sum_follow_from_its_weights(tmp_path, monkeypatch):
    """Its keys follow from the weights, so nothing is listed twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.yaml").write_text(LAYER)
    graph = load_recipe("sum.yaml").recipe.graph
    assert graph["sum_inf"].inputs == ["strict", "lenient"]
    assert graph["sum_inf"].outputs == ["rewards"]


@pytest.mark.parametrize(
    ("weight", "hint"),
    [
        ("leniant", "did you mean lenient?"),
        ("lenient_reward", "did you mean lenient?"),
        ("brevity", "add a call that makes brevity"),
    ],
)
def test_a_key_that_no_call_produces_is_refused_where_weights_name_it(
    tmp_path, monkeypatch, weight, hint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.yaml").write_text(LAYER.replace("lenient: 0.25", f"{weight}: 0.25"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("sum.yaml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("R71", f"sum.yaml:12:{39 + len(weight)}")
    assert f"sum_inf reads {weight}, which neither a call nor the dataset provides" in problem.what
    assert problem.hint == hint


def test_two_calls_that_write_rewards_are_refused(tmp_path, monkeypatch):
    """A reward that is not renamed would be lost in the sum."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.yaml").write_text(
        LAYER.replace("  reward_inf: {output_key_remap: {rewards: strict}}\n", "")
    )
    with pytest.raises(RecipeError, match="rewards"):
        load_recipe("sum.yaml")


def test_gdpo_is_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gdpo = LAYER.replace("ppo_math", "grpo_math").replace("0.25}}", "0.25}, group_norm: true}")
    (tmp_path / "gdpo.yaml").write_text(gdpo + "grpo: {baseline: batch, scale: batch}\n")
    graph = load_recipe("gdpo.yaml").recipe.graph
    assert graph["sum_inf"].interface.args["group_norm"]
    assert graph["advantages"].interface.args["scale"] == "batch"
