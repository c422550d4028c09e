"""Which keys of a recipe may change when a run is resumed."""

import pytest

from rlcli.recipe.changes_on_resume import RULES, Kind, changes, kind_of_change
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import SECTIONS


def test_every_section_has_a_rule():
    assert set(SECTIONS) <= set(RULES)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("seed=7", Kind.FORBIDDEN),
        ("models.actor.path=recipe:sft_math#critic", Kind.FORBIDDEN),
        ("train.shuffle=false", Kind.FORBIDDEN),
        ("graph.critic_train.call=evaluate", Kind.FORBIDDEN),
        ("graph.actor_train.hooks.copy_to=ref", Kind.FORBIDDEN),
        ("graph.actor_train.hooks.eta=0.5", Kind.ALTERS),
        ("graph.actor_train.hooks.offload=true", Kind.SAFE),
        ("graph.actor_train.hooks.transfer=delta", Kind.SAFE),
        ("ppo.kl_ctl=0.5", Kind.ALTERS),
        ("models.actor.backend.args.lr=1e-6", Kind.ALTERS),
        ("train.prompts_per_step=16", Kind.ALTERS),
        ("generation.temperature=0.5", Kind.ALTERS),
        ("train.max_tokens_per_microbatch=999", Kind.SAFE),
        ("checkpoint.every_steps=5", Kind.SAFE),
        ("log.plot=false", Kind.SAFE),
        ("launch=local", Kind.SAFE),
        ("models.critic.mesh.dp=1", Kind.SAFE),
        ("train.max_staleness=1", Kind.ALTERS),
        ("models.critic.backend.args.gradient_checkpointing=true", Kind.SAFE),
        ("models.actor.backend.args.kv_cache_tokens=4096", Kind.SAFE),
        ("models.ref.backend.args.kv_cache_tokens=4096", Kind.SAFE),
        ("models.actor.backend.args.shard_size=2", Kind.SAFE),
        ("models.actor.backend.args.beta1=0.5", Kind.ALTERS),
    ],
)
def test_a_change_has_the_kind_of_its_rule(override, kind):
    before = load_recipe("ppo_math").recipe
    now = (
        before
        if override.startswith(("models.actor.path", "graph."))
        else load_recipe("ppo_math", [override]).recipe
    )
    if now is before:
        path = tuple(override.partition("=")[0].split("."))
        assert kind_of_change(path, before, follows=False) is kind
        return
    assert (
        max((change.kind for change in changes(before, now)), key=list(Kind).index) is kind
    )  # a value may have many uses


TWO_DEVICES = (
    "cluster.devices_per_node=2",
    *(f"models.{role}.devices='0'" for role in ("actor", "critic", "ref")),
)


@pytest.mark.parametrize(
    ("rollout", "kind"),
    [
        ("{devices: '0'}", Kind.SAFE),
        ("{devices: '0-1', mesh: {dp: 2}}", Kind.SAFE),
        ("{devices: '1', backend: fsdp}", Kind.ALTERS),
        ("null", Kind.FORBIDDEN),
    ],
)
def test_a_rollout_may_move_and_change_its_layout(rollout, kind):
    """Whether there is a copy that generates is part of the run: it has a version,
    and its calls name it."""
    before, now = (
        load_recipe(
            "ppo_math", [*TWO_DEVICES, "launch=local", f"models.actor.rollout={section}"]
        ).recipe
        for section in ("{devices: '1'}", rollout)
    )
    kinds = [change.kind for change in changes(before, now)]
    assert max(kinds, key=[Kind.SAFE, Kind.ALTERS, Kind.FORBIDDEN].index) is kind


@pytest.mark.parametrize(("schedule", "kind"), [("constant", Kind.SAFE), ("linear", Kind.ALTERS)])
def test_more_steps_alter_a_run_only_if_its_learning_rate_decays(schedule, kind):
    settings = [f"models.{role}.backend.args.schedule={schedule}" for role in ("actor", "critic")]
    before, now = (
        load_recipe("ppo_math", [*settings, f"train.steps={steps}"]).recipe for steps in (20, 80)
    )
    assert [change.kind for change in changes(before, now)] == [kind]


DECLARING = """
from dataclasses import dataclass
from typing import ClassVar
from rlcli.api.model import ModelBackend, register_backend

@register_backend("zz_declares")
@dataclass(frozen=True, kw_only=True)
class Declares(ModelBackend):
    "One of a user's own."

    ON_RESUME: ClassVar[dict[str, str]] = {"style": "safe", "layout": "forbidden"}
    FOLLOWS_LENGTH: ClassVar[dict[str, str]] = {"style": "plain"}
    style: str = "plain"
    layout: str = "rows"
    lr: float = 0.1
"""


def test_a_users_backend_declares_which_arguments_may_change(tmp_path, monkeypatch):
    (tmp_path / "backends").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "backends" / "zz_declares.py").write_text(DECLARING)
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def load(args, *others):
        return load_recipe(
            "sft_math",
            [f"models.actor.backend={{_replace_: true, type: zz_declares{args}}}", *others],
        )

    plain = load("").recipe
    for args, kind in (
        ("style: wild", "safe"),
        ("layout: columns", "forbidden"),
        ("lr: 1.0", "alters"),
    ):
        changed = changes(plain, load(f", args: {{{args}}}").recipe)
        assert {change.kind.value for change in changed} == {kind}
    wild = ", args: {style: wild}"
    assert [change.kind for change in changes(plain, load("", "train.steps=7").recipe)] == [
        Kind.SAFE
    ]
    assert [
        change.kind for change in changes(load(wild).recipe, load(wild, "train.steps=7").recipe)
    ] == [Kind.ALTERS]


def test_a_change_holds_both_values():
    before, now = load_recipe("ppo_math").recipe, load_recipe("ppo_math", ["train.steps=80"]).recipe
    (change,) = changes(before, now)
    assert (change.key, change.before, change.now) == ("train.steps", before.train.steps, 80)


def test_equal_recipes_have_no_changes():
    recipe = load_recipe("ppo_math").recipe
    assert changes(recipe, recipe) == []
