"""The schema, the components' arguments, and consistency between sections."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.dataflow import CallGraph, OffloadHook, ParamReallocHook
from rlcli.errors import DataError, ModelError, RecipeError, ResourceError
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.named_files import for_any_folder
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe
from rlcli.recipe.warm_start import chain, warm_starts
from rlcli.topology import plan_topology

TOP = "extends: small\n"
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train: {stpes: 3}\n", ("R42", "bad.yaml:2:9")),
        ("max_new_tokens: 3\n", ("R43", "bad.yaml:2:1")),
        ("train: {Steps: 3}\n", ("R43", "bad.yaml:2:9")),
        ("per_device_train_batch_size: 8\n", ("R42", "bad.yaml:2:1")),
        ("train: {st\u0435ps: 3}\n", ("R23", "bad.yaml:2:9")),
        ("train: {steps: true}\n", ("R37", "bad.yaml:2:16")),
        ("train: {steps: 1e3}\n", ("R37", "bad.yaml:2:16")),
        ("train: {steps: '3'}\n", ("R37", "bad.yaml:2:16")),
        ("train: {shuffle: yes}\n", ("R37", "bad.yaml:2:18")),
        ("train: {prompts_per_step: null}\n", ("R39", "bad.yaml:2:27")),
        ("train: {prompts_per_step: 0}\n", ("R35", "bad.yaml:2:27")),
        ("seed: -1\n", ("R35", "bad.yaml:2:7")),
        ("train: 5\n", ("R37", "bad.yaml:2:8")),
        ("datasets: [a]\n", ("R37", "bad.yaml:2:11")),
        ("launch: locl\n", ("R37", "bad.yaml:2:9")),
        ("generation: {temperature: 0.0}\n", ("R49", "bad.yaml:2:27")),
        ("name: ../x\n", ("R68", "bad.yaml:2:7")),
        ("datasets: {-rf: arithmetic}\n", ("R68", "bad.yaml:2:12")),
        ("graph: {sft_train: {interface: stf}}\n", ("R70", "bad.yaml:2:32")),
        ("graph: {sft_train: {interface: os.system}}\n", ("R70", "bad.yaml:2:32")),
        ("datasets: {train: ../../x}\n", ("R70", "bad.yaml:2:19")),
        (
            "datasets: {train: {type: arithmetic_demonstrations, args: {hasti: 1}}}\n",
            ("R42", "bad.yaml:2:60"),
        ),
        ("datasets: {train: {args: {problems: 1.5}}}\n", ("R37", "bad.yaml:2:37")),
        ("models: {actor: {backend: {args: {lr: fast}}}}\n", ("R37", "bad.yaml:2:39")),
        ("models: {actor: {path: HuggingFaceTB/x}}\n", ("R47", "small.yaml:3:5")),
        ("models: {actor: {scratch: null}}\n", ("R39", "bad.yaml:2:10")),
        ("models: {actor: {tokenizer: null}}\n", ("R39", "bad.yaml:2:10")),
        ("models: {actor: {scratch: {model_type: 3}}}\n", ("R39", "bad.yaml:2:18")),
        ("models: {actor: {backend: {type: null}}}\n", ("R47", "bad.yaml:2:34")),
        ("models: {spare: {init: actor}}\n", ("R71", "bad.yaml:2:10")),
        ("graph: {sft_train: {model: actr}}\n", ("R71", "bad.yaml:2:28")),
        ("graph: {sft_train: {call: generate}}\n", ("R71", "bad.yaml:2:27")),
        (
            "graph: {sft_train: {inputs: [packed_input_ids, prompt_mesk]}}\n",
            ("R71", "bad.yaml:2:48"),
        ),
        ("graph: {sft_train: {outputs: [packed_input_ids]}}\n", ("R71", "bad.yaml:2:31")),
        ("train: {epochs: 2}\n", ("R47", "bad.yaml:2:17")),
        ("train: {steps: null}\n", ("R39", "bad.yaml:2:1")),
        ("train: {dataset: trian}\n", ("R71", "bad.yaml:2:18")),
        ("train: {eval: {dataset: test}}\n", ("R71", "bad.yaml:2:25")),
        ("train: {eval: {dataset: train}}\n", ("R39", "bad.yaml:2:9")),
        ("cluster: {devices_per_node: 2}\n", ("R49", "bad.yaml:2:29")),
        ("models: {actor: {devices: 0-1}}\n", ("R50", "bad.yaml:2:27")),
        ("models: {actor: {devices: all}}\n", ("R49", "bad.yaml:2:27")),
        ("models: {actor: {mesh: {tp: 2}}}\n", ("R49", "bad.yaml:2:18")),
        ("launch: local\ncluster: {devices_per_node: 8}\n", ("R49", "small.yaml:15:21")),
        ("cluster: {nodes: 2}\n", ("R49", "bad.yaml:2:10")),
        ("checkpoint: {roles: [actr]}\n", ("R71", "bad.yaml:2:22")),
    ],
)
def test_a_mistake_is_reported_with_id_and_location(refusal, text, problem):
    reported = refusal(TOP + text)
    assert problem in reported
    assert {code for code, _ in reported} == {problem[0]}


def test_a_cycle_of_init_is_refused(refusal):
    text = "models: {actor: {scratch: null, init: b}, b: {init: actor}}\n"
    assert ("R47", "bad.yaml:2:39") in refusal(TOP + text)


@pytest.mark.parametrize(
    ("train", "a", "where"),
    [("{train: 1}", "{train: 1}", "bad.yaml:2:59"), ("{a: 1}", "{train: 1}", "bad.yaml:2:55")],
)
def test_a_dataset_made_of_itself_is_refused_once(refusal, train, a, where):
    mixtures = [f"{{type: mixture, args: {{weights: {weights}}}}}" for weights in (train, a)]
    text = f"datasets: {{train: {mixtures[0]}, a: {mixtures[1]}}}\n"
    assert refusal(TOP + text) == [("R71", where)]


def test_all_problems_are_reported_in_the_order_of_their_lines(refusal):
    text = (
        "train: {stpes: 3, shuffle: yes}\nsed: 1\nlaunch: locl\ngraph: "
        "{sft_train: {interface: stf}}\n"
    )
    reported = refusal(TOP + text)
    assert [where for _, where in reported] == [
        f"bad.yaml:{p}" for p in ("2:9", "2:28", "3:1", "4:9", "5:32")
    ]


def test_a_misspelt_key_is_not_also_reported_as_missing(refusal):
    assert refusal(TOP + "train: {steps: null, stpes: 3}\n") == [("R42", "bad.yaml:2:22")]


def test_a_mistake_that_a_reference_spreads_is_reported_once(folder: Path):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["ppo.kl_cof=0.1"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, problem.hint) == (
        "R42",
        "command line",
        "did you mean kl_ctl?",
    )


def test_numbers_and_words_are_text_where_text_is_expected(folder: Path):
    (folder / "top.yaml").write_text(
        TOP + "name: 1.10\nlog: {dir: on}\nmodels: {actor: {devices: 0}}\n"
    )
    recipe = load_recipe("top.yaml").recipe
    assert (recipe.name, recipe.log.dir, recipe.models["actor"].devices) == ("1.10", "on", "0")


def test_the_message_shows_line_caret_layer_and_hint(folder: Path):
    (folder / "mid.yaml").write_text(TOP + "train:\n  stpes: 3\n")
    (folder / "top.yaml").write_text("\nextends: mid\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml")
    assert str(caught.value).splitlines() == [
        "error[R42] mid.yaml:3:3: unknown key train.stpes. hint: did you mean steps?",
        "    2 | train:",
        "    3 |   stpes: 3",
        "          ^^^^^",
        "    pulled in by top.yaml:2",
    ]


def test_hostile_text_is_data_and_is_escaped_in_messages(folder: Path):
    hostile = "'{{7*7}} {0.__class__} %s <b> ; DROP'"
    (folder / "top.yaml").write_text(TOP + f"log: {{dir: {hostile}}}\n")
    assert load_recipe("top.yaml").recipe.log.dir == hostile.strip("'")
    (folder / "top.yaml").write_text(TOP + 'seed: "\\x1b[31m"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml")
    assert "\x1b" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------


def test_a_missing_model_folder_is_reported(folder: Path):
    with pytest.raises(ModelError) as caught:
        load_recipe("ppo_math", ["models.actor.path=./gone"])
    assert (caught.value.exit_code, caught.value.where) == (5, "command line")


def test_dataset_files_are_searched_next_to_the_recipe_too(folder: Path):
    (folder / "sub").mkdir()
    (folder / "sub" / "top.yaml").write_text(
        "extends: small\ndatasets: {train: {type: prompt_answer, args: {path: rows.jsonl}}}\n"
    )
    (folder / "sub" / "small.yaml").write_text((folder / "small.yaml").read_text())
    with pytest.raises(DataError) as caught:
        load_recipe("sub/top.yaml")
    assert (caught.value.exit_code, caught.value.where) == (4, "sub/top.yaml:2:54")
    (folder / "sub" / "rows.jsonl").write_text("")
    assert load_recipe("sub/top.yaml").recipe.datasets["train"].args["path"] == str(
        folder / "sub" / "rows.jsonl"
    )
    (folder / "rows.jsonl").write_text("")
    assert load_recipe("sub/top.yaml").recipe.datasets["train"].args["path"] == "rows.jsonl"


def test_backend_files_are_found_next_to_the_recipe_and_links_are_kept(folder: Path):
    """A virtual environment's Python is a link to another one,
    which knows nothing of the environment."""
    (folder / "sub" / "venv").mkdir(parents=True)
    (folder / "python").write_text("")
    (folder / "sub" / "top.yaml").write_text(
        "extends: ppo_math\nmodels: {actor: {rollout: {backend: {type: sglang, args: "
        "{python: venv/python}}}}}\n"
    )
    with pytest.raises(ResourceError, match="there is no venv/python") as caught:
        load_recipe("sub/top.yaml")
    assert (caught.value.exit_code, caught.value.where) == (6, "sub/top.yaml:2:67")
    (folder / "sub" / "venv" / "python").symlink_to(folder / "python")

    def python(*overrides: str) -> str:
        recipe = for_any_folder(load_recipe("sub/top.yaml", overrides).recipe)
        return recipe.models["actor_rollout"].backend.args["python"]

    assert python() == str(folder / "sub" / "venv" / "python")
    (folder / "venv").symlink_to(folder / "sub" / "venv")
    assert python() == str(folder / "venv" / "python")
    assert python("models.actor.rollout.backend.args.python=python3") == "python3"


def test_the_template_of_a_job_is_searched_next_to_the_layer_that_names_it(folder: Path):
    (folder / "site").mkdir()
    template = folder / "site" / "job.j2"
    (folder / "site" / "cluster.yaml").write_text(
        "launch: {type: slurm, slurm: {template: job.j2}}\n"
    )
    (folder / "top.yaml").write_text("extends: [small, site/cluster]\n")
    assert load_recipe("top.yaml").recipe.launch.slurm.template == "job.j2"  # is reported later
    template.write_text("")
    assert load_recipe("top.yaml").recipe.launch.slurm.template == str(template)


def test_a_hub_id_needs_no_folder(folder: Path):
    assert (
        load_recipe("ppo_math", ["models.actor.path=owner/name"]).recipe.models["actor"].path
        == "owner/name"
    )


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_math", "sft_math"])
def test_shipped_recipes_survive_a_round_trip_with_the_same_plan(folder: Path, name):
    resolved = load_recipe(name)
    assert Recipe.model_validate(resolved.to_json()) == resolved.recipe
    (folder / f"{name}.yaml").write_text(resolved.to_yaml())
    again = load_recipe(folder / f"{name}.yaml")
    assert again.recipe == resolved.recipe
    assert again.to_yaml() == resolved.to_yaml()
    assert plan_topology(again.recipe) == plan_topology(resolved.recipe)
    for graph in (train_graph(again.recipe), eval_graph(again.recipe)):
        assert sorted(CallGraph(graph).order()) == sorted(mfc.name for mfc in graph)


def test_shipped_recipes_begin_with_two_comment_lines():
    for path in (REPOSITORY / "recipes").rglob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        assert lines[1].startswith("# Needs: "), path


KEY_TEXT = st.text(st.characters(whitelist_categories=("Ll", "Nd")), min_size=1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=("Cs", "Cc", "Cf", "Cn", "Zl", "Zp"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY_TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, min_size=1))
def test_any_value_is_dumped_and_loaded_unchanged(folder: Path, value):
    (folder / "small.yaml").unlink(missing_ok=True)
    base = load_recipe("sft_math").to_json()
    base["models"]["actor"]["scratch"] = {"model_type": "llama", "rope_parameters": value}
    from rlcli.recipe.parsing.write import to_yaml

    (folder / "dumped.yaml").write_text(to_yaml(base), encoding="utf-8")
    assert (
        load_recipe("dumped.yaml").recipe.models["actor"].scratch
        == base["models"]["actor"]["scratch"]
    )


VALID = (REPOSITORY / "recipes" / "ppo_math.yaml").read_bytes()


@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")),
    )
)
def test_any_bytes_give_a_recipe_or_a_recipe_error(folder: Path, raw):
    (folder / "any.yaml").write_bytes(raw)
    with pytest.raises(RecipeError):
        load_recipe("any.yaml")


@given(st.integers(0, len(VALID) - 1), st.binary(max_size=3), st.integers(0, 4))
def test_any_mutation_gives_a_recipe_or_an_rlcli_error(folder: Path, position, inserted, removed):
    (folder / "any.yaml").write_bytes(VALID[:position] + inserted + VALID[position + removed :])
    with suppress(RecipeError, ModelError):
        load_recipe("any.yaml")


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_override_gives_a_recipe_or_a_recipe_error(folder: Path, overrides):
    with suppress(RecipeError):
        load_recipe("small.yaml", overrides)


# -- warm starts -----------------------------------------------------------------------------------


def test_the_chain_of_warm_starts_is_in_order(folder: Path):
    (folder / "a.yaml").write_text("extends: small\n")
    warm = "extends: small\nmodels: {{actor: {{scratch: null, path: 'recipe:{}#actor'}}}}\n"
    (folder / "b.yaml").write_text(warm.format("a"))
    (folder / "c.yaml").write_text(warm.format("b.yaml"))
    resolved = load_recipe("c.yaml")
    assert [source.recipe.name for source in chain(resolved)] == ["a", "b"]
    (start,) = warm_starts(resolved)
    assert (start.role, start.source.recipe.name, start.source_role) == ("actor", "b", "actor")


@pytest.mark.parametrize(
    ("path", "code"),
    [("recipe:gone#actor", "R51"), ("recipe:small#critic", "R51"), ("recipe:c#actor", "R52")],
)
def test_impossible_warm_starts_are_refused(folder: Path, path, code):
    (folder / "c.yaml").write_text(
        f"extends: small\nmodels: {{actor: {{scratch: null, path: '{path}'}}}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        chain(load_recipe("c.yaml"))
    assert [(p.code, p.where) for p in caught.value.problems] == [(code, "c.yaml:2:39")]


def test_a_circle_of_warm_starts_is_reported_at_the_role_that_closes_it(folder: Path):
    (folder / "c.yaml").write_text(
        "extends: ppo_math\nmodels: {ref: {init: null, path: 'recipe:c#actor'}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        chain(load_recipe("c.yaml"))
    assert [(p.code, p.where) for p in caught.value.problems] == [("R52", "c.yaml:2:34")]


def test_a_warm_start_without_a_role_is_refused(refusal):
    assert ("R45", "bad.yaml:2:39") in refusal(
        TOP + "models: {actor: {scratch: null, path: 'recipe:sft_math'}}\n"
    )


# -- calls -----------------------------------------------------------------------------------------


def test_a_classifier_replaces_the_reward_of_ppo(folder: Path):
    """ReaLHF's sentiment example."""
    (folder / "sentiment.yaml").write_text(
        "extends: ppo_math\ntrain: {eval: {_replace_: true}}\n"
        "graph: {reward_inf: {interface: {type: hf_reward, args: {path: me/classifier}},"
        " outputs: [rewards]}}\n"
    )
    call = load_recipe("sentiment.yaml").recipe.graph["reward_inf"]
    assert (call.interface.type, call.interface.args, call.outputs) == (
        "hf_reward",
        {"path": "me/classifier"},
        ["rewards"],
    )


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("graph.actor_train.hooks.copy_to=reff", "reff"),
        ("graph.actor_train.hooks.copy_to=actor", "trained itself"),
        ("graph.actor_train.hooks.copy_to=critic", "trained itself"),
        (
            "graph.critic_train.hooks.copy_to=ref",
            "critic has the head value, but ref, which follows it, has the head lm",
        ),
        ("graph.actor_train.hooks.copy_to=reward", "reward has no weights and cannot follow actor"),
        ("graph.reward_inf.hooks.copy_to=ref", "reward has no weights to copy"),
        ("graph.reward_inf.hooks.offload=true", "reward has no weights to offload"),
    ],
)
def test_impossible_hooks_are_refused(override, word):
    with pytest.raises(RecipeError, match=word):
        load_recipe("ppo_math", [override])


def test_a_role_that_follows_another_gets_all_that_a_step_trains():
    copy, again, copy_again = (
        "graph.actor_train.hooks={copy_to: ref, eta: 0.1}",
        "graph.again={model: actor, call: train_step, interface: sft}",
        "graph.again.hooks={copy_to: ref, eta: 0.1}",
    )
    with pytest.raises(RecipeError, match="ref would lack what again trains") as caught:
        load_recipe("ppo_math", [copy, again])
    assert caught.value.problems[0].hint == "move graph.actor_train.hooks to graph.again"
    load_recipe("ppo_math", [again, copy_again])
    load_recipe("ppo_math", [copy, again, copy_again])


def test_a_reference_may_follow_the_actor():
    overrides = [
        "graph.actor_train.hooks={copy_to: ref, eta: 0.1}",
        "graph.ref_inf.hooks.offload=true",
    ]
    calls = {mfc.name: mfc for mfc in train_graph(load_recipe("ppo_math", overrides).recipe)}
    assert calls["actor_train"].post_hooks == (ParamReallocHook(target="ref", eta=0.1),)
    assert calls["ref_inf"].post_hooks == (OffloadHook(),)


def test_a_moving_average_needs_weights_in_float32():
    overrides = [
        "graph.actor_train.hooks={copy_to: ref, eta: 0.1}",
        "models.ref.backend.args.dtype=bfloat16",
    ]
    with pytest.raises(RecipeError, match="would never move") as caught:
        load_recipe("ppo_math", overrides)
    assert (
        caught.value.problems[0].hint
        == "use models.ref.backend.args.dtype=auto, which holds them in float32"
    )
    load_recipe("ppo_math", [overrides[0], "models.ref.backend.args.dtype=float32"])
    load_recipe("ppo_math", ["graph.actor_train.hooks={copy_to: ref}", overrides[1]])


@pytest.mark.parametrize("call", ["critic_inf", "critic_train"])
def test_calls_that_share_an_interface_need_the_same_arguments(folder: Path, call):
    """Two instances would each have a value normaliser of their own,
    and values would be wrong from step 2 on."""
    with pytest.raises(
        RecipeError, match="critic_inf and critic_train share the interface ppo_critic"
    ) as caught:
        load_recipe("ppo_math", [f"graph.{call}.interface.args.minibatches=8"])
    assert [problem.where for problem in caught.value.problems] == ["command line"]


def test_calls_without_state_may_differ_in_their_arguments(folder: Path):
    interface = "interface: {type: reference, args: {temperature: 0.5}}"
    second = (
        f"{{model: ref, call: inference, {interface}, output_key_remap: "
        "{packed_ref_logprobs: cold}}"
    )
    load_recipe("ppo_math", [f"graph.cold_inf={second}"])
    load_recipe("ppo_math", ["train.eval.graph.eval_gen.interface.args.generation.greedy=false"])
