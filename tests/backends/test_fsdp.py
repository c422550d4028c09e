"""fsdp: the contract, and its specifics: recomputed layers, temporary full copies,
files written by each rank."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pretend_cuda import needs_pretend_device, pretend_cuda
from router_checks import RouterChecks
from safetensors.torch import load_file

from rlcli.api.config import MicroBatchSpec
from rlcli.api.model_source import local_part
from rlcli.backends._generation import BatchDecoder
from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import RATES, SETTINGS
from rlcli.testing.backend.differences import weights_apart
from rlcli.testing.backend.forward import ForwardChecks, scores
from rlcli.testing.backend.generation import NEW_TOKENS, BackendGenerationChecks, generate
from rlcli.testing.backend.layouts import ranks_in
from rlcli.testing.backend.objectives import answer_loss, answer_weight, train
from rlcli.testing.backend.optimizer import OptimizerChecks
from rlcli.testing.backend.plain import PlainTraining, greedy_answers, plain_answer_loss
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.backend.state import StateChecks, restore, save
from rlcli.testing.backend.training import BackendTrainingChecks
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

SELECTIVE = {"gradient_checkpointing": True, "recompute": "selective"}
# ranks that wait for each other are found by the contract itself
pytestmark = pytest.mark.timeout(900)


class TestContract(BackendContract):
    name = "fsdp"
    families = ("llama", "gpt2", "gemma2")


class TestRouters(RouterChecks):
    name = "fsdp"


@pytest.mark.exhaustive
class TestOtherFamilies(
    StateChecks, BackendGenerationChecks, OptimizerChecks, BackendTrainingChecks, ForwardChecks
):
    name = "fsdp"
    families = ("mistral", "cohere", "gemma3_text", "gpt_neox", "granite", "olmo2")


def test_two_ranks_hold_half_each_and_a_full_copy_only_to_generate(tmp_path):
    def work(rank):
        engine = TestContract().engine(mesh=mesh_of_ranks(dp=2))
        train(engine, 0)
        generate(engine, prompts(), greedy=True)
        with engine.generator() as lm:
            references = [weakref.ref(parameter) for parameter in lm.parameters()]
            numbers = sum(parameter.numel() for parameter in lm.parameters())
            del lm
        gc.collect()
        save(engine, tmp_path, rank)
        dist.barrier()
        local = sum(parameter.to_local().numel() for parameter in engine.lm.parameters())
        return {
            "held": numbers,
            "left": sum(ref() is not None for ref in references),
            "share": local / numbers,
        }

    ranks = run_on_ranks(2, work)
    assert all(rank["held"] == sum(p.numel() for p in tiny_model().parameters()) for rank in ranks)
    assert [rank["left"] for rank in ranks] == [0, 0]
    assert [rank["share"] for rank in ranks] == pytest.approx([0.5, 0.5], abs=0.01)
    for subfolder in ("models", "optim"):
        assert sorted(file.name[:11] for file in (tmp_path / subfolder).iterdir()) == [
            "shard-00001",
            "shard-00002",
        ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_ranks_export_the_full_model(family, tmp_path):
    """Tied output matrices are written once, and nothing but the folder remains."""

    def work(rank):
        engine = TestContract().engine(family, seed=5, mesh=mesh_of_ranks(dp=2))
        engine.save_to_hf(None, str(tmp_path / "model"))
        return {}

    run_on_ranks(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    written, model = load_file(tmp_path / "model" / "model.safetensors"), tiny_model(family, seed=5)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert written.keys() == parameters.keys()
    assert all(torch.equal(written[name], parameters[name]) for name in parameters)


def test_a_single_rank_writes_its_weights_as_one_file(tmp_path):
    engine = TestContract().engine()
    engine.forward(batch())
    save(engine, tmp_path)
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["model.safetensors"]


def test_weights_and_moments_are_moved_together():
    engine = TestContract().engine()
    train(engine, 0)
    # as between CPU and GPU, parameters stay the objects
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:  # that the optimizer knows
        engine._move(torch.device("meta"))  # tensors that were not moved stand out
        engine._move_optimizer(torch.device("meta"))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    state = engine.state()
    moved = [
        tensor for tensor in (*state.weights.values(), *state.optimizer.values()) if tensor.dim()
    ]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert len(moved) == 3 * len(state.weights)


# -- layouts ---------------------------------------------------------------------------------------

EXHAUSTIVE = pytest.mark.exhaustive
ULYSSES, RING = {"context_parallel": "ulysses"}, {"context_parallel": "ring"}


def deviations_from_plain_loop(family, layout, settings, steps=2, **changes):
    """A few steps of `family` on the ranks of a layout with uneven shares of each batch,
    then greedy answers."""

    def work(rank):
        mesh = mesh_of_ranks(**layout)
        lm = tiny_model(family, **changes)
        engine = TestContract().engine(
            lm=lm, mesh=mesh, expert_ranks=layout.get("ep", 1), **(SETTINGS | settings)
        )
        replicas = layout.get("dp", 1)
        replica = rank * replicas // ranks_in(layout)
        cuts = {1: (0, 7), 2: (0, 5, 7), 4: (0, 1, 4, 4, 7)}[replicas]
        share = range(cuts[replica], cuts[replica + 1])
        stats = [
            engine.train_batch(
                batch(step).select_indices(share),
                answer_loss,
                answer_weight,
                "global",
                MicroBatchSpec(n_mbs=1 + step),
                step,
            )
            for step in range(steps)
        ]
        weights = TestContract().weights(engine)
        plain = PlainTraining(
            tiny_model(family, **changes), TestContract().optimizer_settings(**SETTINGS)
        )
        expected = [
            plain.step([batch(step)], plain_answer_loss, RATES[step]) for step in range(steps)
        ]
        answers = [tokens.tolist() for tokens in generate(engine, prompts(), greedy=True).tokens]
        return {
            "loss": stats[0]["loss"] / expected[0]["loss"] - 1,
            "norms": [
                a["grad_norm"] / b["grad_norm"] - 1 for a, b in zip(stats, expected, strict=True)
            ],
            "weights": weights_apart(weights, plain.weights()),
            "answers": answers == greedy_answers(plain.lm.float(), prompts(), NEW_TOKENS),
        }

    return run_on_ranks(ranks_in(layout), work, timeout=120)


def assert_like_plain_loop(ranks):
    for deviations in ranks:
        assert abs(deviations["loss"]) < 1e-6
        assert max(map(abs, deviations["norms"])) < 1e-5
        assert deviations["weights"] < 5e-5
        assert deviations["answers"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        pytest.param("qwen3", {}, marks=EXHAUSTIVE),
        pytest.param("gemma2", {}, marks=EXHAUSTIVE),
        pytest.param("gpt_neox", {}, marks=EXHAUSTIVE),
        pytest.param("cohere", {}, marks=EXHAUSTIVE),
        pytest.param("olmo2", {}, marks=EXHAUSTIVE),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_tensor_parallel_families_train_and_answer_like_a_plain_loop(family, changes):
    assert_like_plain_loop(deviations_from_plain_loop(family, {"tp": 2}, {}, **changes))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("llama", 4, ULYSSES),  # fewer key heads than ranks
        # 4 heads cannot be divided: a ring
        pytest.param("qwen3", 3, {}, marks=EXHAUSTIVE),
        ("mistral", 2, RING),  # windows
        # windows in one layer, capped scores
        pytest.param("gemma2", 2, ULYSSES, marks=EXHAUSTIVE),
        pytest.param("gemma2", 2, RING, marks=EXHAUSTIVE),
        pytest.param("gemma3_text", 4, RING, marks=EXHAUSTIVE),
        pytest.param("gpt2", 2, RING, marks=EXHAUSTIVE),  # learned positions
    ],
    ids=str,
)
def test_context_parallel_families_train_and_answer_like_a_plain_loop(family, ranks, settings):
    assert_like_plain_loop(deviations_from_plain_loop(family, {"cp": ranks}, settings))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_log_probs_under_ulysses_are_those_of_one_rank_to_the_bit(family):
    def work(rank, ranks, settings):
        torch.set_num_threads(1)  # the order in which products are summed depends on it
        engine = TestContract().engine(family, mesh=mesh_of_ranks(cp=ranks), **settings)
        return {"scores": scores(engine, batch(), "log-probs").tolist()}

    alone = run_on_ranks(1, partial(work, ranks=1, settings={}))
    assert run_on_ranks(2, partial(work, ranks=2, settings=ULYSSES)) == alone * 2


def test_context_parallel_ranks_offer_the_logits_of_all_tokens():
    expected = TestContract().engine().forward(batch())

    def work(_):
        engine = TestContract().engine(mesh=mesh_of_ranks(cp=2), **RING)
        return {"apart": float((engine.forward(batch()) - expected).abs().max())}

    assert all(rank["apart"] < 1e-4 for rank in run_on_ranks(2, work))


def test_a_context_parallel_rank_computes_with_its_share_of_the_tokens():
    """Blocks and the head see no more of them; a loss sees all."""

    def work(_):
        engine = TestContract().engine(mesh=mesh_of_ranks(cp=4))
        seen = {"block": set(), "loss": set()}
        engine.lm.base_model.layers[0].mlp.register_forward_pre_hook(
            lambda _, inputs: seen["block"].add(inputs[0].shape[1])
        )

        def loss(output, sample):
            seen["loss"].add(len(output.logprobs))
            seen["block"].add(len(output._hidden))
            return answer_loss(output, sample)

        engine.train_batch(batch(), loss, answer_weight)
        return {name: sorted(counts) for name, counts in seen.items()}

    lengths = batch().flat_seqlens("packed_input_ids")
    expected = {"block": [-(-sum(lengths) // 4)], "loss": [sum(lengths) - len(lengths)]}
    assert run_on_ranks(4, work) == [expected] * 4


def test_context_parallel_ranks_divide_the_prompts_of_a_call(monkeypatch):
    """Each generates for its own, also if there are fewer prompts than ranks; all return all."""
    several = [prompts(), prompts(lengths=(4,)), prompts().select_indices([])]
    expected = [sampled(TestContract().engine(), asked) for asked in several]

    def work(_):
        engine, decoded, run = TestContract().engine(mesh=mesh_of_ranks(cp=2)), [], BatchDecoder.run

        def recorded(decoder, own_prompts, seeds):
            decoded.append(len(own_prompts))
            return run(decoder, own_prompts, seeds)

        monkeypatch.setattr(BatchDecoder, "run", recorded)
        return {"answers": [sampled(engine, asked) for asked in several], "decoded": decoded}

    ranks = run_on_ranks(2, work)
    assert [rank["decoded"] for rank in ranks] == [[3, 1, 0], [2, 0, 0]]
    for rank in ranks:
        for (answers, logprobs), (expected_answers, theirs) in zip(
            rank["answers"], expected, strict=True
        ):
            assert answers == expected_answers
            assert logprobs == pytest.approx(theirs, abs=1e-5)


def sampled(engine, asked):
    """Two answers to each prompt, with whether they ended; the log-probs of their tokens."""
    generated = generate(engine, asked, responses_per_prompt=2, temperature=0.7)
    answers = [tokens.tolist() for tokens in generated.tokens]
    return [answers, generated.ended.tolist()], torch.cat(
        [torch.zeros(0), *generated.logprobs]
    ).tolist()


def test_heads_that_ulysses_cannot_divide_are_refused():
    reason = "the 4 attention heads of role actor cannot be divided among 3 context-parallel"

    def work(_):
        with pytest.raises(ModelError, match=reason) as caught:
            TestContract().engine("llama", mesh=mesh_of_ranks(cp=3), **ULYSSES)
        return {"hint": caught.value.hint}

    assert all("context_parallel=ring" in rank["hint"] for rank in run_on_ranks(3, work))


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"dp": 4}, {"shard_size": 2}),
        ({"dp": 2}, {"defer_reduction": True}),
        ({"dp": 2, "tp": 2}, SELECTIVE),
        *(
            pytest.param(layout, settings, marks=EXHAUSTIVE)
            for layout, settings in [
                ({"dp": 2, "tp": 2}, {"gradient_checkpointing": True}),
                ({"dp": 4}, {"shard_size": 2, "defer_reduction": True}),
                ({"dp": 2, "cp": 2}, {"shard_size": 2}),
                ({"dp": 2, "cp": 2}, {"defer_reduction": True, **RING}),
                ({"cp": 2, "tp": 2}, {"gradient_checkpointing": True, **RING}),
                ({"cp": 2, "dp": 2}, {**SELECTIVE, **RING}),
            ]
        ),
    ],
    ids=str,
)
def test_layouts_train_like_a_plain_loop(layout, settings):
    assert_like_plain_loop(deviations_from_plain_loop("llama", layout, settings, steps=3))


@pytest.mark.long
@pytest.mark.parametrize(
    ("experts", "settings"),
    [
        (2, SELECTIVE),  # two ranks hold the same one, and halve it
        pytest.param(2, {"gradient_checkpointing": True}, marks=EXHAUSTIVE),
        pytest.param(4, {"shard_size": 2, "defer_reduction": True}, marks=EXHAUSTIVE),
    ],
)
def test_ranks_that_divide_experts_train_like_a_plain_loop(experts, settings):
    layout = {"dp": 4, "ep": 2}
    changes = {"num_local_experts": experts}
    assert_like_plain_loop(deviations_from_plain_loop("mixtral", layout, settings, **changes))


def test_experts_are_held_by_their_ranks_alone():
    def work(rank):
        layout = {"dp": 2, "ep": 2}
        engine = TestContract().engine("mixtral", mesh=mesh_of_ranks(**layout), expert_ranks=2)
        experts = engine.lm.model.layers[0].mlp.experts
        parts = {name: local_part(p) for name, p in experts.named_parameters()}
        return {
            name: [values.shape[0], region[0].start] for name, (values, region) in parts.items()
        }

    for rank, parts in enumerate(run_on_ranks(2, work)):
        assert parts == {"gate_up_proj": [2, 2 * rank], "down_proj": [2, 2 * rank]}


@pytest.mark.parametrize(
    ("family", "changes", "finding"),
    [
        ("mixtral", {"num_local_experts": 3}, "the 3 experts of role actor cannot be divided"),
        ("llama", {}, "the llama of role actor has no experts to divide"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(family, changes, finding):
    def work(rank):
        with pytest.raises(ModelError, match=finding):
            TestContract().engine(
                lm=tiny_model(family, **changes), mesh=mesh_of_ranks(dp=2, ep=2), expert_ranks=2
            )
        return {}

    run_on_ranks(2, work)


@pytest.mark.long
def test_gradients_are_reduced_once_per_step_or_per_micro_batch(monkeypatch):
    """Replicas reduce once per step; ranks that share a copy reduce per micro-batch,
    or once if deferred."""

    def work(rank):
        exchanged = dict.fromkeys(("all_reduce", "reduce_scatter"), 0)
        # one of the last two is used
        for function in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
            if (real := getattr(dist, function, None)) is None:
                continue
            name = "all_reduce" if function == "all_reduce" else "reduce_scatter"

            def counted(output, *args, real=real, name=name, **kwargs):
                exchanged[name] += output.numel() > 100  # not a sum of stats
                return real(output, *args, **kwargs)

            monkeypatch.setattr(dist, function, counted)
        volumes = {}
        for defer in (False, True):
            engine = TestContract().engine(
                mesh=mesh_of_ranks(dp=4), shard_size=2, defer_reduction=defer
            )
            for cuts in (1, 3):
                before = dict(exchanged)
                engine.train_batch(
                    batch(), answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=cuts)
                )
                volumes[f"{defer} {cuts}"] = [exchanged[name] - before[name] for name in exchanged]
        return volumes

    for volumes in run_on_ranks(4, work, timeout=120):
        once = volumes["False 1"]
        assert min(once) > 0
        assert volumes["False 3"] == [once[0], 3 * once[1]]
        assert volumes["True 1"] == volumes["True 3"] == once


@pytest.mark.long
def test_a_checkpoint_of_replicas_is_written_once_and_can_be_continued(tmp_path):
    """In the same layout bit-equal, even after offloading, and also in another layout."""

    def work(rank):
        def engine(layout, **settings):
            return TestContract().engine(mesh=mesh_of_ranks(**layout), **SETTINGS, **settings)

        first = engine({"dp": 4}, shard_size=2)
        train(first, 0)
        save(first, tmp_path, rank)
        dist.barrier()
        resumed = [engine({"dp": 4}, shard_size=2, seed=1), engine({"dp": 2, "tp": 2}, seed=1)]
        for continued in resumed:
            restore(continued, tmp_path)
        first.offload()
        for trained in (first, *resumed):
            train(trained, 1)
        expected = TestContract().weights(first)
        return {
            "apart": [
                weights_apart(TestContract().weights(continued), expected) for continued in resumed
            ]
        }

    for result in run_on_ranks(4, work, timeout=120):
        assert result["apart"][0] == 0
        assert result["apart"][1] < 5e-5
    written = sum(file.stat().st_size for file in (tmp_path / "models").iterdir())
    assert written == pytest.approx(sum(p.nbytes for p in tiny_model().parameters()), rel=0.1)


@needs_pretend_device
def test_an_offloaded_role_leaves_the_device_and_trains_the_same():
    """An offloaded role keeps nothing on the device,
    and trains like one that was never offloaded."""
    with pretend_cuda() as device:
        resting, staying = (TestContract().engine(device="cuda", **SETTINGS) for _ in range(2))
        for step in range(3):
            for engine in (staying, resting):
                before = torch.cuda.memory_allocated()
                engine.train_batch(
                    batch(step).to(device), answer_loss, answer_weight, version_steps=step
                )
            resting.offload()
            tensors = [*resting.state().weights.values(), *resting.state().optimizer.values()]
            assert {tensor.device.type for tensor in tensors if tensor.dim()} == {"cpu"}
            if step:
                assert torch.cuda.memory_allocated() == before
            generate(resting, prompts(), greedy=True)  # needs the weights alone
            moments = [tensor for tensor in resting.state().optimizer.values() if tensor.dim()]
            assert {tensor.device.type for tensor in moments} == {"cpu"}
            resting.offload()
        expected = TestContract().weights(staying)
        assert all(
            torch.equal(weight, expected[name])
            for name, weight in TestContract().weights(resting).items()
        )


@pytest.mark.parametrize("settings", [{"defer_reduction": True}, {}], ids=str)
def test_gradients_of_a_failed_step_are_dropped(settings):
    """Including those that were not reduced yet."""

    def work(rank):
        engine, fresh = (
            TestContract().engine(mesh=mesh_of_ranks(dp=2), **(SETTINGS | settings))
            for _ in range(2)
        )
        cuts = MicroBatchSpec(n_mbs=3)
        seen = []

        def fails_at_the_last(output, sample):
            seen.append(sample)
            if len(seen) == 3:
                raise RuntimeError("the reward is not there")
            return answer_loss(output, sample)

        with pytest.raises(RuntimeError, match="not there"):
            engine.train_batch(batch(5), fails_at_the_last, answer_weight, mb_spec=cuts)
        norms = [
            trained.train_batch(batch(), answer_loss, answer_weight, mb_spec=cuts)["grad_norm"]
            for trained in (engine, fresh)
        ]
        return {"norms": norms}

    for result in run_on_ranks(2, work):
        assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_log_probs_in_bfloat16_do_not_depend_on_sharding(family):
    """Weights gathered in bfloat16 equal those that autocast produces."""

    def scored(mesh):
        engine = TestContract().engine(family, mesh=mesh, dtype="bfloat16")
        return scores(engine, batch(), "log-probs").tolist()

    expected = scored(None)
    ranks = run_on_ranks(2, lambda _: {"scores": scored(mesh_of_ranks(dp=2))})
    assert ranks == [{"scores": expected}] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "its 3 attention heads cannot be",
        ),
        ({"num_key_value_heads": 1}, "its 1 key-value heads cannot be divided among 2 ranks"),
        (
            None,
            (
                "gpt2 of role actor cannot be tensor-parallel: transformers has no "
                "tensor-parallel plan for it"
            ),
        ),
    ],
)
def test_models_that_cannot_be_tensor_parallel_are_refused(changes, reason):
    def work(_):
        lm = tiny_model("gpt2") if changes is None else tiny_model("llama", **changes)
        with pytest.raises(ModelError, match=reason) as caught:
            TestContract().engine(lm=lm, mesh=mesh_of_ranks(tp=2))
        return {"hint": caught.value.hint}

    assert all("models.actor.mesh.tp=1" in result["hint"] for result in run_on_ranks(2, work))


def test_logits_are_refused_when_the_vocabulary_is_sharded():
    def work(_):
        engine = TestContract().engine(mesh=mesh_of_ranks(tp=2))
        with pytest.raises(ModelError, match="logits are not available"):
            engine.forward(batch())
        return {}

    run_on_ranks(2, work)


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused():
    def work(_):
        with pytest.raises(
            ModelError, match="shard_size is 2, which does not divide the 3 data- and context"
        ):
            TestContract().engine(mesh=mesh_of_ranks(dp=3), shard_size=2)
        return {}

    run_on_ranks(3, work)
