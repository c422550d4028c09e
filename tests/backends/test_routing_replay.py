"""Routing replay: what it is for, how experts are stored, and what it refuses. That prescribed
experts give the numbers of a plain loop is for the contract."""

from types import SimpleNamespace

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters, MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ROUTED_EXPERTS, SEQUENCES
from rlcli.api.model import Model
from rlcli.backends._routing_replay import RoutedLayers, RouterChoices
from rlcli.errors import ModelError
from rlcli.interfaces._responses import sample_responses
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import distance
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.plain import sequences
from rlcli.testing.backend.routing_replay import chosen_by, routers_of, with_experts
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


class Trainer(BackendContract):
    name = "fsdp"


class Sampler(BackendContract):
    name = "inference"


def sampling_routers(engine):
    """Those of the model that an engine generates with."""
    with engine.generator(packs=True) as lm:
        return list(routers_of(lm))


def route_otherwise(engine):
    """Have the routers of an engine choose other experts than the most likely: it stands in for a
    sampler that rounds differently. Their weights are still those of the scores."""

    def chooses_least_likely(router):
        normalizes = getattr(engine.lm.config, "norm_topk_prob", True)

        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
            scores = logits.softmax(-1)
            experts = torch.topk(-scores, router.top_k, dim=-1).indices
            weights = scores.gather(-1, experts)
            return logits, weights / (weights.sum(-1, keepdim=True) if normalizes else 1), experts

        return forward

    for router in sampling_routers(engine):
        router.forward = chooses_least_likely(router)


def sampled(engine, **settings):
    """A batch of responses with the experts of their tokens, as an actor's call would make it."""
    role = SimpleNamespace(module=engine, tokenizer=TinyTokenizer(), seed=0)
    gconfig = GenerationHyperparameters(max_new_tokens=12, routing_replay=True, **settings)
    return sample_responses(role, prompts(), gconfig)


def role_of(engine):
    return Model("actor", engine, TinyTokenizer(), torch.device("cpu"))


def gap(trainer, responses, replays):
    """The largest distance of the trainer's log-probs from the sampler's, on sampled tokens,
    relative to the largest."""
    actor = PPOActorInterface(generation={"routing_replay": replays})
    left_out = set() if replays else {ROUTED_EXPERTS}
    data = responses.select(responses.keys - left_out)
    again = actor.inference(role_of(trainer), data, MicroBatchSpec(n_mbs=3))
    return distance(again.data["packed_logprobs"], responses.data["packed_logprobs"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recomputes", [False, True])
def test_replay_closes_the_gap_that_other_experts_make(family, recomputes):
    sampler = Sampler().engine(family)
    route_otherwise(sampler)
    trainer = Trainer().engine(family, gradient_checkpointing=recomputes, **SETTINGS)
    responses = sampled(sampler, responses_per_prompt=2, max_concurrent_responses=3)
    assert gap(trainer, responses, replays=False) > 0.1
    assert gap(trainer, responses, replays=True) <= 1e-6


def test_replay_closes_the_gap_of_routers_that_round_to_bfloat16():
    """As in practice: choices differ near ties alone, and what remains is the rounding."""
    sampler, trainer = Sampler().engine("mixtral"), Trainer().engine("mixtral", **SETTINGS)
    for router in sampling_routers(sampler):
        compute = router.forward

        def forward(hidden, compute=compute):
            return compute(hidden.to(torch.bfloat16).to(hidden.dtype))

        router.forward = forward
    responses = sampled(sampler, responses_per_prompt=32)
    without, replayed = (gap(trainer, responses, replays) for replays in (False, True))
    assert replayed < without / 20


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_learn_from_replayed_experts(family):
    sampler = Sampler().engine(family)
    route_otherwise(sampler)
    trainer = Trainer().engine(family, **SETTINGS)
    before = [router.weight.detach().clone() for router in routers_of(trainer.lm)]
    trainer.train_batch(
        sampled(sampler), answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=2)
    )
    for router, old in zip(routers_of(trainer.lm), before, strict=True):
        assert (router.weight - old).abs().max() > 1e-4


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_load_of_experts_is_that_of_the_replayed_ones(micro_batches):
    trainer = Trainer().engine("mixtral", router_aux_loss_coef=0.1, **SETTINGS)
    sample = with_experts(batch(), "mixtral")
    all_on_two = torch.tensor([2, 3], dtype=torch.uint8).expand_as(sample.data[ROUTED_EXPERTS])
    sample.data[ROUTED_EXPERTS] = all_on_two
    stats = trainer.train_batch(
        sample, answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=micro_batches)
    )
    tokens, sequences_ = sum(sample.flat_seqlens(SEQUENCES)), len(sample.flat_seqlens(SEQUENCES))
    # the last token of each sequence is routed freely
    assert stats["router_load_max"] >= 2 * (tokens - sequences_) / tokens
    assert stats["router_load_min"] <= 2 * sequences_ / tokens
    assert stats["router_dropped"] == pytest.approx(0, abs=1e-9)


def test_generation_after_training_with_replay_routes_freely():
    trainer = Trainer().engine("mixtral", **SETTINGS)
    free = generate(trainer, greedy=True).tokens
    sample = with_experts(batch(), "mixtral")
    rows = sample.seqlens[ROUTED_EXPERTS]
    trainer.forward(sample, post_hook=lambda output, _: output.logprobs, output_seqlens=rows)
    assert [t.tolist() for t in generate(trainer, greedy=True).tokens] == [t.tolist() for t in free]


def paused(questions):
    """Responses of a stream that gets other weights after the first of them."""
    engine, source = Sampler().engine("mixtral", seed=1), Sampler().engine("mixtral", seed=2)
    settings = GenerationHyperparameters(
        max_new_tokens=100, max_concurrent_responses=3, routing_replay=True
    )
    with engine.open(TinyTokenizer(), settings, longest_prompt=17) as stream:
        for seed, prompt in enumerate(questions):
            stream.submit(prompt, seed)
        responses = stream.collect()
        stream.pause()
        engine.take_parameters(source, 1.0)
        stream.resume()
        while len(responses) < len(questions):
            responses += stream.collect()
    return responses


def test_tokens_that_are_read_again_have_the_experts_of_the_new_weights():
    questions = sequences(prompts(), "packed_prompts")
    last = [response for response in paused(questions) if response.segments[-1].weights == 1]
    assert any(len(response.segments) == 2 for response in last)
    for response in last:
        text = torch.cat([questions[response.number], response.tokens])
        expected = chosen_by(tiny_model("mixtral", seed=2), text[:-1])
        assert torch.equal(response.routed_experts.long().sort(-1).values, expected)


def test_experts_beyond_255_fit_their_dtype_on_any_rank():
    config = {"num_local_experts": 300, "intermediate_size": 8}
    lm = tiny_model("mixtral", **config)
    alone = generate(Sampler().engine(lm=lm), routing_replay=True)

    def drawn(rank):
        engine = Sampler().engine(lm=lm, mesh=mesh_of_ranks(cp=2))
        experts = generate(engine, routing_replay=True).routed_experts
        return [rows.tolist() for rows in experts]

    assert {rows.dtype for rows in alone.routed_experts} == {torch.int16}
    assert max(int(rows.max()) for rows in alone.routed_experts) > 255
    expected = [rows.tolist() for rows in alone.routed_experts]
    assert run_on_ranks(2, drawn) == [expected, expected]


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_records_have_the_smallest_dtype_that_holds_every_expert(experts, dtype):
    assert RoutedLayers((0,), 1, experts, 2).no_tokens.dtype == dtype
    assert torch.iinfo(dtype).max >= experts - 1


def test_choices_are_recorded_only_in_a_pass_that_asks_for_them():
    lm, tokens = tiny_model("mixtral"), torch.tensor([[3, 1, 4]])
    routers = RouterChoices(lm, "actor")
    with routers.recorded() as choices:
        lm(input_ids=tokens)
    lm(input_ids=tokens)
    assert [tuple(of_layer.shape) for of_layer in choices] == [(3, 2)] * 2


def test_routers_that_choose_in_several_steps_are_refused():
    sampler = Sampler().engine("mixtral")
    for router in sampling_routers(sampler):
        compute = router.forward

        def forward(hidden, compute=compute):
            torch.topk(hidden, 1)
            return compute(hidden)

        router.forward = forward
    with pytest.raises(ModelError, match="choose experts in 2 steps"):
        sampled(sampler)


def test_a_batch_of_responses_has_experts_for_all_but_the_last_token():
    responses = sampled(Sampler().engine("mixtral"), responses_per_prompt=2)
    lengths = [[length - 1 for length in group] for group in responses.seqlens[SEQUENCES]]
    assert responses.seqlens[ROUTED_EXPERTS] == lengths
    assert responses.trailing_shapes[ROUTED_EXPERTS] == (2, 2)
    halves = responses.split(2)
    assert SequenceSample.gather(halves).seqlens[ROUTED_EXPERTS] == lengths


def test_an_engine_that_ignores_the_setting_is_refused():
    class Ignoring:
        def generate(self, input_, tokenizer, gconfig, seeds):
            return generate(Sampler().engine("mixtral"))

    with pytest.raises(ModelError, match="does not report the experts"):
        sampled(Ignoring())


@pytest.mark.parametrize(
    ("family", "finding"), [("qwen2_moe", "experts per token in"), ("llama", "no routers")]
)
def test_experts_that_a_model_lacks_are_refused(family, finding):
    with pytest.raises(ModelError, match=finding):
        Trainer().engine(family).train_batch(
            with_experts(batch(), "mixtral"), answer_loss, answer_weight
        )


@pytest.mark.parametrize(("layers", "per_token"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_experts_of_a_model_of_other_sizes_are_refused(layers, per_token):
    replayed = RoutedLayers((0, 2), 4, 8, 2)
    replayed.check(torch.zeros(5, 2, 2), "actor")
    with pytest.raises(ModelError, match=f"{per_token} experts per token in {layers} layers"):
        replayed.check(torch.zeros(5, layers, per_token), "actor")


def test_a_sampler_reports_experts_only_if_it_is_asked_and_has_routers():
    assert generate(Sampler().engine("mixtral")).routed_experts is None
    with pytest.raises(ModelError, match="has no routers"):
        generate(Sampler().engine("llama"), routing_replay=True)


def test_no_prompts_give_no_experts():
    role = SimpleNamespace(module=Sampler().engine("mixtral"), tokenizer=TinyTokenizer(), seed=0)
    settings = GenerationHyperparameters(max_new_tokens=4, routing_replay=True)
    responses = sample_responses(role, prompts().select_indices([]), settings)
    assert responses.seqlens[ROUTED_EXPERTS] == []


def test_no_experts_are_made_up_in_a_mock():
    actor = PPOActorInterface(generation={"routing_replay": True})
    with pytest.raises(NotImplementedError, match="routed_experts"):
        actor.mock("generate", role_of(None), prompts())
