"""`null` takes away an entry, or what layers set of an optional key;
a reference to it is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.introspection.difference import differences, values_of_resolved
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.resolve import load_recipe

NO_CRITIC = """\
extends: ppo_math
models: {critic: null}
graph:
  critic_inf: null
  critic_train: null
ppo: {disable_value: true}
"""

NO_REFERENCE = ["graph.ref_inf=null", "models.ref=null", "ppo.kl_ctl=0.0"]


def problems(name: str, *overrides: str) -> list[tuple[str, str | None, str, str | None]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return [
        (problem.code, problem.where, problem.what, problem.hint)
        for problem in caught.value.problems
    ]


# -- removed entries -------------------------------------------------------------------------------


def test_a_layer_removes_a_role_and_its_calls(folder: Path):
    (folder / "mine.yaml").write_text(NO_CRITIC)
    resolved = load_recipe("mine.yaml")
    assert list(resolved.recipe.models) == ["actor", "ref", "reward"]
    assert list(resolved.recipe.graph) == [
        "actor_gen",
        "reward_inf",
        "ref_inf",
        "advantages",
        "actor_train",
    ]
    assert "values" not in resolved.recipe.graph["advantages"].inputs
    places = {key: str(mark) for key, mark in resolved.removed.items()}
    assert places == {
        "models.critic": "mine.yaml:2:18",
        "graph.critic_inf": "mine.yaml:4:15",
        "graph.critic_train": "mine.yaml:5:17",
    }


def test_an_override_removes_entries_too():
    recipe = load_recipe("ppo_math", NO_REFERENCE).recipe
    assert "ref" not in recipe.models
    assert all("packed_ref_logprobs" not in call.inputs for call in recipe.graph.values())
    without = load_recipe("ppo_math", ["datasets.held_out=null", "train.eval=null"]).recipe
    assert list(without.datasets) == ["train"]
    assert without.train.eval.dataset is None
    assert not without.train.eval.graph


def test_a_higher_layer_may_define_a_removed_entry_again(folder: Path):
    (folder / "less.yaml").write_text(NO_CRITIC)
    call = "critic_inf: {model: critic, call: inference, interface: ppo_critic}"
    text = (
        f"extends: less.yaml\nmodels: {{critic: {{path: a/b, head: value}}}}\ngraph: {{{call}}}\n"
    )
    (folder / "more.yaml").write_text(text)
    resolved = load_recipe("more.yaml")
    critic = resolved.recipe.models["critic"]
    # nothing of the role that was removed is left
    assert (critic.path, critic.init) == ("a/b", None)
    assert critic.backend is not None
    assert critic.backend.args == {}
    assert "models.critic" not in resolved.removed


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("seed", 1),
        ("train.microbatches", 1),
        ("checkpoint", {"save": True}),
        ("train.eval", {"dataset": None, "graph": {}}),
        ("generation", {"max_new_tokens": 256}),
        ("generation.max_new_tokens", 256),
        ("models.actor.mesh", {"dp": None, "tp": 1}),
        ("graph.ref_inf.hooks", {"offload": False}),
        ("graph.ref_inf.interface.args", {}),
        ("ppo.kl_ctl", None),
        ("ppo", None),
        ("checkpoint.every_seconds", "null"),
        ("models.actor.tokenizer", "null"),
    ],
)
def test_null_restores_the_default_unless_null_is_a_valid_value(
    folder: Path, key: str, default: object
):
    """Whether the lower layer set it or not."""
    (folder / "set.yaml").write_text(
        "extends: ppo_math\nseed: 7\ntrain: {microbatches: 3}\ncheckpoint: {save: false, "
        "every_seconds: 9}\n"
        "models: {actor: {mesh: {dp: 1}, tokenizer: 'builtin:arithmetic'}}\n"
        "graph: {ref_inf: {hooks: {offload: true}}}\n"
    )
    resolved = load_recipe("set.yaml", [f"{key}=null", "train.prompts_per_step=8"])
    document = resolved.to_json()
    if default is None:
        assert "kl_ctl" not in document["graph"]["actor_gen"]["interface"]["args"]
        return
    value = document
    for name in key.split("."):
        value = value[name]
    assert value == (None if default == "null" else value if isinstance(default, dict) else default)
    if isinstance(default, dict):
        assert default.items() <= value.items()


def test_a_reference_to_a_null_key_gives_its_default(folder: Path):
    recipe = load_recipe(
        "ppo_math", ["generation.temperature=null", "generation.max_new_tokens=null"]
    ).recipe
    assert recipe.graph["ref_inf"].interface.args == {"temperature": 1.0}
    evaluation = recipe.train.eval.graph["eval_gen"].interface.args["generation"]
    assert evaluation["max_new_tokens"] == recipe.generation.max_new_tokens == 256


def test_a_block_that_only_removed_calls_used_is_still_accepted(folder: Path):
    (folder / "mine.yaml").write_text("""\
extends: small
mine: {a_word: 1}
graph:
  other: {model: actor, call: train_step, interface: {type: sft, args: "${mine}"}}
""")
    (folder / "top.yaml").write_text("extends: mine.yaml\ngraph: {other: null}\n")
    assert list(load_recipe("top.yaml").recipe.graph) == ["sft_train"]
    load_recipe("top.yaml", ["mine=null"])


# -- references to removed entries -----------------------------------------------------------------


def test_calls_of_a_removed_role_are_refused(folder: Path):
    (folder / "mine.yaml").write_text("extends: ppo_math\nmodels: {critic: null}\n")
    ((code, where, message, hint),) = problems("mine.yaml")
    assert (code, message) == ("R71", "the role critic is removed at mine.yaml:2:18")
    calls = "graph.critic_inf=null graph.critic_train=null"
    assert hint == f"remove the calls too: {calls}, and set ppo.disable_value=true"
    assert where is not None
    assert "base/ppo.yaml" in where


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        (
            "models: {ref: null, twin: {init: ref}}\ngraph: {ref_inf: {model: twin}}",
            "mine.yaml:2:34",
            "the role ref is removed at mine.yaml:2:15",
            None,
        ),
        (
            (
                "models: {ref: null}\ngraph: {ref_inf: null}\nppo: {kl_ctl: 0.0}\n"
                "checkpoint: {roles: [ref]}"
            ),
            "mine.yaml:5:22",
            "the role ref is removed at mine.yaml:2:15",
            None,
        ),
        (
            (
                "models: {ref: null}\ngraph: {ref_inf: null, actor_train: {hooks: {copy_to: "
                "ref}}}\nppo: {kl_ctl: 0.0}"
            ),
            "mine.yaml:3:55",
            "the role ref is removed at mine.yaml:2:15",
            None,
        ),
        (
            "datasets: {held_out: null}\ntrain: {eval: {dataset: held_out}}",
            "mine.yaml:3:25",
            "the dataset held_out is removed at mine.yaml:2:22",
            "train.eval.dataset=null evaluates nothing",
        ),
        (
            "datasets: {train: null}\ntrain: {dataset: train}",
            "mine.yaml:3:18",
            "the dataset train is removed at mine.yaml:2:19",
            None,
        ),
        (
            (
                "graph: {ref_inf: null}\nmodels: {ref: null}\nppo: {kl_ctl: "
                "'${graph.ref_inf.interface.args.temperature}'}"
            ),
            "mine.yaml:4:15",
            (
                "${graph.ref_inf.interface.args.temperature}: graph.ref_inf is "
                "removed at mine.yaml:2:18"
            ),
            None,
        ),
        (
            (
                "models: {ref: null}\ngraph: {ref_inf: null}\nppo: {kl_ctl: 0.0}\nlog: {dir: "
                "'${models.ref.devices}'}"
            ),
            "mine.yaml:5:12",
            "${models.ref.devices}: models.ref is removed at mine.yaml:2:15",
            None,
        ),
    ],
)
def test_a_reference_to_a_removed_entry_is_one_problem_at_the_reference(
    folder: Path, text, where, message, hint
):
    (folder / "mine.yaml").write_text(f"extends: ppo_math\n{text}\n")
    assert [problem[1:] for problem in problems("mine.yaml")] == [(where, message, hint)]


def test_a_call_that_takes_over_a_removed_one_has_its_removal_as_the_hint():
    words = [
        "models.actor.path=recipe:sft_math#actor",
        "datasets.train={_replace_: true, type: arithmetic_unpaired}",
        "kto.loss=apo_zero_unpaired",
        "graph.mismatched=null",
        "graph.ref_mismatched_inf=null",
    ]
    hints = [hint for *_, hint in problems("kto", *words)]
    names = ["train.eval.graph.eval_mismatched", "train.eval.graph.eval_ref_mismatched"]
    assert hints == [f"remove {name} too: {name}=null" for name in names]
    load_recipe("kto", [*words, *(f"{name}=null" for name in names)])


def test_a_key_that_only_a_removed_call_produces_is_one_problem(folder: Path):
    (folder / "mine.yaml").write_text("extends: ppo_math\ngraph: {critic_inf: null}\n")
    ((code, where, message, hint),) = problems("mine.yaml")
    assert code == "R71"
    assert where is not None
    assert where.endswith("base/ppo.yaml:44:23")
    assert message.startswith("advantages and critic_train read values")
    assert hint == "critic_inf, which made it, is removed at mine.yaml:2:21: keep it"
    removed = "models: {critic: null}\ngraph: {critic_inf: null, critic_train: null"
    listed = f"{removed}, reward_inf: {{inputs: [packed_input_ids, prompt_mask, values]}}}}"
    (folder / "mine.yaml").write_text(
        f"extends: ppo_math\n{listed}\nppo: {{disable_value: true}}\n"
    )
    assert [problem[1:] for problem in problems("mine.yaml", "train.eval.dataset=null")] == [
        (
            "mine.yaml:3:100",
            "reward_inf reads values, which neither a call nor the dataset provides",
            "critic_inf, which made it, is removed at mine.yaml:3:21",
        )
    ]


def test_a_removed_call_with_many_readers_is_one_problem():
    ((code, _, message, hint),) = problems("ppo_math", "graph.actor_gen=null", "train.eval=null")
    assert code == "R71"
    assert message == (
        "reward_inf, ref_inf, critic_inf, advantages, actor_train and critic_train read "
        "packed_input_ids, prompt_mask, packed_logprobs and seq_no_eos_mask, which neither a "
        "call nor the dataset provides"
    )
    assert hint == "actor_gen, which made it, is removed on the command line: keep it"


def test_built_in_training_settings_vanish_with_the_training_of_a_role():
    """Its backend is another one by default."""
    backend = load_recipe("ppo_math", ["graph.critic_train=null"]).recipe.models["critic"].backend
    assert backend is not None
    assert (backend.type, backend.args) == ("inference", {"dtype": "float32"})


def test_the_users_training_settings_of_a_role_that_is_no_longer_trained_are_refused(folder: Path):
    text = "extends: ppo_math\nmodels: {critic: {backend: {args: {lr: 1e-5, eps: 1e-6}}}}\n"
    (folder / "mine.yaml").write_text(text)
    ((code, where, message, hint),) = problems("mine.yaml", "graph.critic_train=null")
    assert (code, where) == ("R71", "mine.yaml:2:36")
    assert message == (
        "models.critic.backend is inference because the call critic_train is removed on the "
        "command line; it has no argument lr or eps"
    )
    dropped = ["models.critic.backend.args.lr=null", "models.critic.backend.args.eps=null"]
    assert hint == f"remove what it does not have: {' '.join(dropped)}"
    load_recipe("mine.yaml", ["graph.critic_train=null", *dropped])


def test_a_value_that_is_not_a_call_is_one_problem():
    ((code, _, message, hint),) = problems("ppo_math", "graph.critic_inf=none")
    assert (code, message) == ("R37", "graph.critic_inf must be a mapping, found text 'none'")
    assert hint == "write null"


@pytest.mark.parametrize("key", ["graph.ref_inf.interface", "datasets.train"])
def test_null_type_is_refused_except_for_backends(key: str):
    assert ("R39", "command line", f"{key}.type is required: text, found null", None) in problems(
        "ppo_math", f"{key}.type=null"
    )
    assert problems("ppo_math", f"{key}.type=7")[0][0] == "R70"
    load_recipe("ppo_math", ["models.reward.backend.type=null"])


@pytest.mark.parametrize("key", ["models.critic.init", "models.actor.path"])
def test_a_role_whose_weights_are_removed_is_one_problem(key: str):
    ((code, _, message, _),) = problems("ppo_math", f"{key}=null")
    assert code == "R39"
    assert message.endswith("has no weights: give one of path, init, scratch")


def test_a_role_whose_last_call_is_removed_is_refused(folder: Path):
    ((code, _, message, hint),) = problems("ppo_math", "graph.ref_inf=null", "ppo.kl_ctl=0.0")
    assert (code, message) == (
        "R71",
        "no call uses the role ref: ref_inf is removed on the command line",
    )
    assert hint == "models.ref=null removes it too"


@pytest.mark.parametrize(
    ("override", "code", "message", "hint"),
    [
        (
            "graph.critic_infr=null",
            "R42",
            "null removes graph.critic_infr, which no layer below has",
            "did you mean critic_inf?",
        ),
        (
            "models.judge=null",
            "R42",
            "null removes models.judge, which no layer below has",
            "there is actor, critic, ref, reward",
        ),
        ("ppp=null", "R42", "unknown key ppp", "did you mean ppo?"),
        (
            "train.prompts_per_step=null",
            "R39",
            "train.prompts_per_step is required: int, found null",
            None,
        ),
        ("graph=null", "R39", "graph is required: a mapping, found null", None),
    ],
)
def test_invalid_removals_are_refused(
    folder: Path, override: str, code: str, message: str, hint: str | None
):
    assert (code, "command line", message, hint) in problems(
        "ppo_math", override, "train.eval=null"
    )


def test_an_invalid_removal_that_a_reference_spreads_is_one_error(folder: Path):
    reward = "graph.reward_inf.interface={type: weighted_sum, args: {weights: {a: null}}}"
    ((code, _, message, _),) = problems("ppo_math", reward)  # the evaluation has this call too
    key = "graph.reward_inf.interface.args.weights.a"
    assert (code, message) == ("R42", f"null removes {key}, which no layer below has")


# -- explain, diff and flat recipes ----------------------------------------------------------------


def test_explain_shows_a_removal(folder: Path):
    (folder / "mine.yaml").write_text(NO_CRITIC)
    resolved = load_recipe("mine.yaml")
    explanation = explain(resolved, "models.critic.head")
    assert not isinstance(explanation, list)
    assert explanation.removed == "at mine.yaml:2:18"
    assert [(step.value, step.note, step.wins) for step in explanation.steps] == [
        ("lm", None, False),
        ("value", None, False),
        ("null", "removes models.critic", True),
    ]
    again = explain(load_recipe("ppo_math", ["ppo.kl_ctl=null"]), "ppo.kl_ctl")
    assert not isinstance(again, list)
    assert again.value == 0.1
    assert [step.wins for step in again.steps] == [True, False, False]


def test_a_removal_is_a_difference(folder: Path):
    (folder / "mine.yaml").write_text(NO_CRITIC)
    before, now = (values_of_resolved(load_recipe(name)) for name in ("ppo_math", "mine.yaml"))
    gone = {
        ".".join(difference.key.split(".")[:2])
        for difference in differences(before, now)
        if difference.kind == "removed"
    }
    assert gone == {"models.critic", "graph.critic_inf", "graph.critic_train"}


def test_a_flattened_recipe_with_removals_loads_to_the_same(folder: Path):
    (folder / "mine.yaml").write_text(NO_CRITIC)
    recipe = load_recipe("mine.yaml")
    (folder / "flat.yaml").write_text(recipe.to_yaml())
    assert load_recipe("flat.yaml").recipe == recipe.recipe
