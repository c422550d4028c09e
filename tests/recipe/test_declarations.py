"""What components declare in their classes, and which recipes are refused because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli import registry
from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.errors import RecipeError
from rlcli.recipe.components import dataset_keys, declared
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Component
from rlcli.recipe.validation.semantics import routing
from rlcli.recipe.warm_start import chain

GROUPED = """
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rlcli.api import model as model_api


class Base(model_api.ModelInterface):
    READS: ClassVar = {"train_step": ("packed_input_ids",), "inference": ("values",)}
    NEEDS_GROUP: ClassVar = {"train_step": ("4 if size=3", "2")}
    PLAIN = (1, 2)
    computed: ClassVar[int] = len("abc")


class Mode(Enum):
    FAST = "fast"


@dataclass
class Grouped(Base):
    size: int = 3
    mode: Mode = Mode.FAST
    pair: tuple[int, str] = (1, "a")

    READS: ClassVar = {"train_step": (..., "prompt_mask if size=3"), "generate": (..., "solved")}

    def train_step(self, model, data, mb_spec):
        return {}


model_api.register_interface("grouped", Grouped)
"""


@pytest.fixture
def project(folder: Path) -> Path:
    """A project with an interface that compares the responses to one prompt."""
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces" / "grouped.py").write_text(GROUPED)
    (folder / "grouped.yaml").write_text(
        "extends: ppo_math\ngraph: {actor_train: {interface: {type: grouped}}}\n"
    )
    return folder


def test_class_constants_are_read_without_importing(project: Path):
    constants = registry.signature("interfaces", "grouped").constants
    assert constants == {
        "NEEDS_GROUP": {"train_step": ("4 if size=3", "2")},
        "PLAIN": (1, 2),
        "READS": {
            "train_step": ("packed_input_ids", "prompt_mask if size=3"),
            "inference": ("values",),
            "generate": ("solved",),
        },
    }
    assert declared("interfaces", "nowhere", "NEEDS_GROUP") is None
    keys = ("packed_input_ids", "prompt_mask", "prompt_lens")
    assert dataset_keys({"train": Component(type="paired")}, "train") == keys
    assert dataset_keys(
        {"train": Component(type="paired", args={"margin_key": "by"})}, "train"
    ) == (*keys, "margins")


def test_an_interface_adds_to_the_declarations_of_its_base(project: Path):
    interface = registry.make_interface(ModelInterfaceAbstraction("grouped", {"size": 2}))
    keys = interface.reads("train_step")
    assert (keys.needed, keys.optional) == (("packed_input_ids",), ("prompt_mask",))
    assert interface.reads("inference").needed == ("values",)
    assert interface.reads("generate").needed == ("solved",)


def test_too_few_responses_for_a_grouped_interface_are_refused(project: Path):
    load_recipe("grouped")
    with pytest.raises(RecipeError, match="needs at least 4, but actor_gen makes 3") as caught:
        load_recipe("grouped", ["generation.responses_per_prompt=3"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, problem.hint) == (
        "R49",
        "command line",
        "generation.responses_per_prompt=8",
    )
    load_recipe("grouped", ["generation.responses_per_prompt=5", "ppo.train_on_best=3"])
    load_recipe(
        "grouped", ["generation.responses_per_prompt=3", "graph.actor_train.interface.args.size=2"]
    )


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("grpo_math", ()),
        ("grpo_math", ("grpo.baseline=none",)),
        ("grpo_math", ("grpo.scale=none",)),
        ("ppo_math", ("ppo.group_adv_norm=true",)),
    ],
)
def test_comparing_responses_to_a_prompt_requires_two_of_them(
    recipe: str, settings: tuple[str, ...]
):
    load_recipe(recipe, [*settings, "generation.responses_per_prompt=2"])
    with pytest.raises(RecipeError, match="needs at least 2, but actor_gen makes 1"):
        load_recipe(recipe, [*settings, "generation.responses_per_prompt=1"])


@pytest.mark.parametrize(
    ("recipe", "interface", "responses"),
    [("ppo_math", "gae", 4), ("grpo_math", "group_relative", 8)],
)
def test_training_on_the_best_responses_requires_more_of_them(
    recipe: str, interface: str, responses: int, tmp_path: Path
):
    """Both places are named: that of the responses in the base, and that of the setting."""
    block = recipe.partition("_")[0]
    layer = tmp_path / "best.yaml"
    layer.write_text(f"{block}:\n  train_on_best: {responses}\n")
    load_recipe(recipe, [f"{block}.train_on_best={responses - 1}"])
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, profiles=[str(layer)])
    (problem,) = caught.value.problems
    assert problem.what == (
        f"{interface} compares the responses to one prompt (train_on_best, {layer}:2:18) and needs "
        f"at least {responses + 1}, but actor_gen makes {responses}"
    )
    assert f"recipes/base/{block}.yaml:" in str(problem.where)


@pytest.mark.parametrize(
    ("settings", "kl_in"),
    [
        (["ppo.kl_in=reward"], "reward (command line)"),
        ([], "reward (the default)"),
        (["ppo.kl_in=loss"], None),
    ],
)
def test_gradient_of_a_penalty_that_is_not_in_the_loss_is_refused(
    settings: list[str], kl_in: str | None
):
    """The setting of the policy has no effect because of one of the call for advantages."""
    load_recipe("ppo_math", [*settings, "ppo.kl_gradient=reverse"])
    if kl_in is None:
        load_recipe("ppo_math", [*settings, "ppo.kl_gradient=naive"])
        return
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", [*settings, "ppo.kl_gradient=naive"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("R71", "command line")
    assert problem.what == (
        "kl_gradient=naive of graph.actor_train has no effect: no call makes kl_weights; "
        f"advantages would make it if kl_in were not {kl_in}"
    )
    assert problem.hint == "set kl_gradient=reverse, or change kl_in of advantages"


@pytest.mark.parametrize(
    ("recipe", "settings", "problem"),
    [
        ("ppo_math", ["ppo.behav_imp_weight_cap=2"],
         "behav_imp_weight_cap needs use_decoupled_loss; use_decoupled_loss is False"),
        ("ppo_math", ["ppo.adaptive_kl_ctl=true", "ppo.kl_ctl=0.0"],
         "adaptive_kl_ctl needs kl_ctl; kl_ctl is 0.0 (command line)"),
        ("ppo_math", ["ppo.adaptive_kl_target=3.0"],
         "adaptive_kl_target needs adaptive_kl_ctl; adaptive_kl_ctl is False"),
        ("grpo_math", ["grpo.overlong_penalty=2.0"],
         "overlong_penalty needs overlong_buffer; overlong_buffer is None"),
        ("grpo_math", ["grpo.turn_discount=0"],
         "turn_discount needs credit=to_go; credit is response"),
        ("grpo_math", ["grpo.loss_aggregation=constant"],
         "loss_aggregation=constant needs loss_constant; loss_constant is None"),
        ("grpo_math", ["grpo.loss_constant=3.0"],
         "loss_constant needs loss_aggregation=constant; loss_aggregation is sequence"),
        ("grpo_math", ["grpo.policy_loss=sapo", "grpo.eps_clip=0.1"],
         "eps_clip needs policy_loss=ppo|gspo|cispo|sequence|dppo_tv|dppo_kl; policy_loss is sapo"),
        ("ppo_math", ["ppo.reward_delta=false"],
         "reward_delta needs use_dense_reward; use_dense_reward is False"),
        ("ppo_math", ["ppo.value_norm=false", "ppo.value_norm_eps=0.1"],
         "value_norm_eps needs value_norm; value_norm is False"),
        ("ppo_math", ["ppo.value_norm=false", "ppo.value_norm_beta=0.9"],
         "value_norm_beta needs value_norm; value_norm is False"),
        ("ppo_math", ["ppo.value_norm_type=ma", "ppo.value_norm_beta=0.9"],
         "value_norm_beta needs value_norm_type=exp; value_norm_type is ma"),
        ("best_of_n_math", ["graph.actor_train.interface.args.best=2"],
         "best needs keep=best; keep is solved"),
        ("dpo_arithmetic", ["dpo.nll_aggregation=token"],
         "nll_aggregation needs nll_coef; nll_coef is 0.0"),
        ("dpo_arithmetic", ["dpo.loss=hinge", "dpo.label_smoothing=0.1"],
         "label_smoothing needs loss=sigmoid|robust; loss is hinge (command line)"),
        ("sft_math", ["models.actor.backend.args.recompute=selective"],
         "recompute needs gradient_checkpointing; gradient_checkpointing is False"),
        ("sft_math", ["models.actor.backend.args.momentum=0.9"],
         "momentum needs optimizer=muon; optimizer is adamw"),
        ("sft_math", ["models.actor.backend.args.offload_activations=true"],
         "offload_activations needs gradient_checkpointing; gradient_checkpointing is False"),
        ("sft_math", ["models.actor.backend.args.attention=flash",
                            "models.actor.backend.args.dtype=float32"],
         "attention=flash needs dtype=auto|bfloat16; dtype is float32 (command line)"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else None,
)  # fmt: skip
def test_arguments_that_contradict_each_other_are_refused(
    recipe: str, settings: list[str], problem: str
):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, settings)
    (reported,) = caught.value.problems
    assert (reported.code, reported.where) == ("R71", "command line")
    assert reported.what.startswith(problem)


def test_an_argument_of_a_layer_that_lacks_what_it_needs_comes_with_how_to_remove_it(folder):
    (folder / "with_muon.yaml").write_text(
        "extends: sft_math\nmodels: {actor: {backend: {args: {optimizer: muon, momentum: 0.9}}}}\n"
    )
    optimizer = "models.actor.backend.args.optimizer=adamw"
    with pytest.raises(RecipeError, match="momentum needs optimizer=muon") as caught:
        load_recipe("with_muon.yaml", [optimizer])
    (hint,) = (problem.hint for problem in caught.value.problems)
    assert hint == "remove it, or set models.actor.backend.args.momentum=null"
    load_recipe("with_muon.yaml", [optimizer, hint.removeprefix("remove it, or set ")])


def test_declared_conditions_of_arguments_name_arguments_and_keys_that_there_are():
    for name in registry.names("interfaces"):
        signature = registry.signature("interfaces", name)
        arguments = {argument.name for argument in signature.arguments}
        entries = [e for of_call in signature.constants["READS"].values() for e in of_call]
        for argument, key in signature.constants.get("NO_EFFECT_WITHOUT", {}).items():
            assert argument in arguments
            assert f"{key} if given" in entries
        for argument, alternatives in signature.constants.get("STALE_NEEDS", {}).items():
            assert {argument, *alternatives} <= arguments
        for conditions in signature.constants.get("NEEDS", {}).items():
            assert {condition.partition("=")[0] for condition in conditions} <= arguments


REPLAY = "generation.routing_replay=true"
ALONE = ["launch=local", "cluster.devices_per_node=2", "models.actor.rollout.devices=1"]


def test_experts_go_from_sampling_to_recomputation_and_training():
    recipe = load_recipe("grpo_math", [REPLAY, *ALONE], profiles=["async_grpo"]).recipe
    assert "routed_experts" in recipe.graph["actor_gen"].outputs
    for name in ("actor_inf", "actor_train"):
        assert "routed_experts" in recipe.graph[name].inputs
    assert "routed_experts" not in recipe.graph["ref_inf"].inputs
    assert "routed_experts" not in recipe.train.eval.graph["eval_gen"].outputs


def routing_problem(*settings):
    """(what, hint) of the one problem that a recipe with replay has."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(*settings)
    reported = [one for one in caught.value.problems if "routing_replay" in one.what]
    (problem,) = reported
    return problem.what, problem.hint


def test_routing_replay_of_a_backend_that_does_not_promise_it_is_refused(monkeypatch):
    monkeypatch.setattr(routing, "declared", lambda kind, name, constant: name != "deepspeed")
    assert routing_problem("grpo_math", [REPLAY, "models.actor.backend.type=deepspeed"]) == (
        "the backend deepspeed of models.actor cannot record the experts of tokens, which "
        "generation.routing_replay asks of graph.actor_gen",
        "set generation.routing_replay=false",
    )


def test_routing_replay_that_nothing_trains_with_is_refused():
    assert routing_problem("distill_math", [REPLAY]) == (
        "generation.routing_replay has no effect: no call trains with the experts of actor_gen",
        "set generation.routing_replay=false",
    )


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed", "megatron"])
def test_every_backend_that_trains_prescribes_experts(backend: str):
    rollout = "models.actor.rollout.backend.args.dtype=float32"
    load_recipe("ppo_math", [REPLAY, f"models.actor.backend.type={backend}", rollout])


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_servers_report_experts(kind: str):
    server = f"{{type: {kind}, args: {{urls: ['http://127.0.0.1:1']}}}}"
    load_recipe("grpo_math", [REPLAY, f"models.actor.rollout.backend={server}"])


def test_comparing_with_the_batch_allows_one_response_per_prompt():
    load_recipe(
        "grpo_math",
        ["grpo.baseline=batch", "grpo.scale=batch", "generation.responses_per_prompt=1"],
    )


def test_responses_longer_than_the_warm_start_model_allows_are_refused(folder: Path):
    chain(load_recipe("ppo_math"))
    with pytest.raises(RecipeError, match=r"512 positions of models\.actor") as caught:
        chain(load_recipe("ppo_math", ["generation.max_new_tokens=600"]))
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [
        ("R49", "command line")
    ]


def test_a_kv_cache_too_small_for_a_response_is_refused(folder: Path):
    setting = "models.actor.backend.args.kv_cache_tokens="
    load_recipe("ppo_math", [f"{setting}104"])
    with pytest.raises(RecipeError, match="a KV cache of 103 tokens has no room") as caught:
        load_recipe("ppo_math", [f"{setting}103"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("R49", "command line")
    assert problem.hint == "use at least 104"
    with pytest.raises(RecipeError, match="kv_cache_tokens"):
        load_recipe("ppo_math", [f"{setting}0"])


def test_only_a_row_limit_set_by_the_user_is_checked_against_the_model(folder: Path):
    """Only a limit that somebody chose is checked against the model's positions."""
    (folder / "rows.jsonl").write_text("")
    settings = [
        "models.actor.scratch={model_type: llama, max_position_embeddings: 300}",
        "models.actor.path=null",
        "models.actor.tokenizer=builtin:arithmetic",
        "datasets.train={type: math_prompts, args: {path: rows.jsonl}}",
        "train.eval.dataset=null",
    ]
    load_recipe("ppo_math", settings)
    with pytest.raises(RecipeError, match="at most 236"):
        load_recipe(
            "ppo_math",
            [*settings[:3], settings[3].replace("}}", ", max_length: 250}}"), settings[4]],
        )


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("mode=fast", "{}: a value of type Mode cannot be written in a recipe"),
        ("pair=[1, b, 3]", "{} has 3 items; it may have at most 2"),
    ],
)
def test_an_argument_that_no_bound_describes_is_refused_in_whole_sentences(project, setting, fault):
    key = "graph.actor_train.interface.args."
    with pytest.raises(RecipeError) as caught:
        load_recipe("grouped.yaml", [f"{key}{setting}"])
    argument = setting.partition("=")[0]
    assert fault.format(f"{key}{argument}") in [problem.what for problem in caught.value.problems]
