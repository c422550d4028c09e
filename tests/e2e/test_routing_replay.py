"""Whole runs of GRPO with a mixture of experts whose sampler rounds more than its trainer."""

import pytest

SMALL = (
    "models.actor.path=null",
    "models.actor.tokenizer=builtin:arithmetic",
    "models.actor.backend.args.lr=1e-3",
    "models.actor.backend.args.eps=1e-3",  # so that rounding does not become a step
    "datasets.train.args.problems=64",
    "datasets.held_out.args.problems=8",
    "generation.max_new_tokens=8",
    "generation.responses_per_prompt=4",
    "grpo.overlong_buffer=6",  # no sum is right: responses differ by their lengths
    "train.prompts_per_step=4",
    "train.eval.every_steps=null",
    "log.plot=false",
    "log.trackers=[]",
)
MIXTURE = (
    "models.actor.scratch={model_type: qwen3_moe, hidden_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, moe_intermediate_size: 64, num_experts: 16, "
    "num_experts_per_tok: 2, norm_topk_prob: true, max_position_embeddings: 128, "
    "initializer_range: 0.2, tie_word_embeddings: true}"
)
DENSE = (
    "models.actor.scratch={model_type: llama, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 1, num_attention_heads: 4, max_position_embeddings: 128}"
)
ROUNDING_SAMPLER = "models.actor.rollout.backend.args.dtype=bfloat16"
REPLAY = "generation.routing_replay=true"
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2", "models.actor.mesh.dp=2")

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_replay_brings_the_trainer_closer_to_a_sampler_that_rounds(train):
    runs = {
        name: train("grpo_math", *SMALL, MIXTURE, "train.steps=1", *changes, name=name)
        for name, changes in {
            "free": (ROUNDING_SAMPLER,),
            "replayed": (ROUNDING_SAMPLER, REPLAY),
        }.items()
    }
    assert {run.code for run in runs.values()} == {0}, [run.err for run in runs.values()]
    gaps = {name: run.steps[0]["actor/sampler_gap"] for name, run in runs.items()}
    assert gaps["replayed"] < 0.5 * gaps["free"]


@pytest.mark.exhaustive
def test_replay_does_not_depend_on_ranks_and_micro_batches(train):
    layouts = {"alone": (), "shared": (*TWO_RANKS, "train.max_tokens_per_microbatch=64")}
    alone, shared = (
        train("grpo_math", *SMALL, MIXTURE, REPLAY, "train.steps=2", *changes, name=name)
        for name, changes in layouts.items()
    )
    assert alone.steps[0]["actor/grad_norm"] > 0.01
    assert alone.code == shared.code == 0, alone.err + shared.err
    for of_alone, of_shared in zip(alone.steps, shared.steps, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/sampler_gap"):
            assert of_shared[name] == pytest.approx(of_alone[name], rel=1e-4, abs=1e-6), name


def test_a_dense_model_is_refused_by_name(train):
    run = train("grpo_math", *SMALL, DENSE, REPLAY, "train.steps=1")
    assert run.code == 5
    assert "the llama of role actor has no routers that can be replayed" in run.err
    assert "set generation.routing_replay=false" in run.err
