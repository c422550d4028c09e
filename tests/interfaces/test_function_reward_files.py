"""Where the function of a `function_reward` comes from: a file, a module,
the project or the folder of a recipe."""

import pytest
import torch

from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import ProjectError, RlcliError
from rlcli.interfaces.rewards._scores import Score
from rlcli.interfaces.rewards.function_reward import FunctionRewardInterface
from rlcli.testing.batches import DigitTokenizer, make_batch


def rewards_of(interface):
    """The rewards of a single response."""
    model = Model("reward", None, DigitTokenizer(), torch.device("cpu"))
    batch = make_batch(["packed_input_ids", "prompt_mask"], [[(2, 3)]])
    rewards = interface.inference(model, batch, MicroBatchSpec()).data["rewards"].tolist()
    interface.pool.close()
    return rewards


def test_a_function_is_loaded_from_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards_room").mkdir()
    (tmp_path / "my_rewards_room" / "short.py").write_text(
        "from my_rewards_room.more import weight\ndef score(): return weight\n"
    )
    (tmp_path / "my_rewards_room" / "more.py").write_text("weight = 2\n")
    interface = FunctionRewardInterface(function="my_rewards_room.short:score", workers=1)
    assert rewards_of(interface) == [2.0]


def test_a_file_is_found_in_the_project(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "mine.py").write_text(
        "import json\nweight = json.load(open('weight.json'))\ndef score(): return weight\n"
    )
    (tmp_path / "weight.json").write_text("4")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    interface = FunctionRewardInterface(path="mine.py", workers=1)
    assert rewards_of(interface) == [4.0]


LAYER = """\
extends: ppo_math
graph:
  reward_inf: {interface: {_replace_: true, type: function_reward, args: {path: mine.py}}}
"""


def test_a_file_is_found_next_to_the_recipe(tmp_path, monkeypatch):
    from rlcli.inspect.model_files import model_faults
    from rlcli.recipe.resolve import load_recipe

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(LAYER)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RlcliError, match=r"graph.reward_inf.interface.args.path: no such file: mine.py"
    ) as caught:
        load_recipe("recipes/mine.yaml")
    assert (caught.value.where, caught.value.exit_code) == ("recipes/mine.yaml:3:81", 4)
    (tmp_path / "recipes" / "mine.py").write_text("def score(): return 1\n")
    resolved = load_recipe("recipes/mine.yaml")
    assert list(model_faults(resolved)) == [], "it is no model"
    args = resolved.recipe.graph["reward_inf"].interface.args
    interface = FunctionRewardInterface(**args, workers=1)
    assert rewards_of(interface) == [1.0]


def test_a_missing_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProjectError, match=r"there is no file none.py in"):
        FunctionRewardInterface(path="none.py")


@pytest.mark.parametrize(
    "args", [{}, {"path": "a.py", "function": "a:b"}, {"function": "a:b", "workers": 0}]
)
def test_invalid_arguments_are_refused(args):
    with pytest.raises(ValueError, match=r"must be at least|path is"):
        FunctionRewardInterface(**args)


def test_responses_that_were_not_tried_do_not_count_as_scored():
    batch = make_batch(["packed_input_ids", "prompt_mask"], [[(2, 3)]] * 4)
    scores = [Score(1.0), Score(error=ProjectError("broken")), None, None]
    interface = FunctionRewardInterface(function="os.path:basename", workers=1)
    with pytest.raises(ProjectError, match="1 of 2 scores that were tried could not"):
        interface.rewarded(batch, scores)
    interface.pool.close()
