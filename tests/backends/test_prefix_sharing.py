"""Models whose sequences begin alike compute the same as for each sequence as a whole, from the
fewest products."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.operations import Products
from rlcli.backends._prefix_sharing import PrefixSharing
from rlcli.backends._transformers import PackedModel
from rlcli.ops.shared_prefixes import Work
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import weights_apart
from rlcli.testing.backend.layouts import ranks_in
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import groups
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
DENSE = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "cohere",
    "granite", "olmo2",
]  # fmt: skip
SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe"]


def group(*responses, prompt=20, seed=0):
    """Sequences of one prompt."""
    stream = torch.Generator().manual_seed(seed)
    draw = torch.randint(3, VOCABULARY, (prompt + sum(responses),), generator=stream).tolist()
    texts, begin = [], prompt
    for length in responses:
        texts.append(draw[:prompt] + draw[begin : begin + length])
        begin += length
    return texts


TURNS = group(6, 0, 9)
BATCHES = {
    "groups": group(4, 7, 1, 9) + group(3, 3, seed=1),
    "pairs": group(8, 2, prompt=5) + group(1, 6, prompt=9, seed=1) + group(4, 4, prompt=2, seed=2),
    "turns": [*TURNS, [*TURNS[0][:24], 5, 6, 7], [*TURNS[0][:24], 5, 6, 8], [*TURNS[2][:24], 5, 6]],
    "a sequence and its beginnings": [text[:n] for n in (9, 4, 9, 1, 7) for text in group(4)],
}


def model_of(lm, shares):
    """A packed model; it shares every prefix that another sequence has, or none."""
    always = PrefixSharing(Work(of_token=1.0, of_key=0.0, skips_hidden=True), CPU, None)
    return PackedModel(lm, torch.float32, share=always.layout if shares else None)


def quantities(lm, sequences, shares, head="lm"):
    """What an output offers, and the gradients of a loss that depends on all of it."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = tuple(map(len, sequences))

    def offered(output):
        if head == "value":
            return {"values": output.values}
        output.temperature = 0.8
        return {"entropies": output.entropy, "log-probs": output.logprobs}

    lm.zero_grad()
    results = model_of(lm, shares)(tokens, lengths, offered)
    stream = torch.Generator().manual_seed(1)
    sum((x * torch.randn(x.shape, generator=stream)).sum() for x in results.values()).backward()
    gradients = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return {name: x.detach().clone() for name, x in (results | gradients).items()}


def assert_same(lm, sequences, head="lm", within=1e-5):
    shared, unshared = (quantities(lm, sequences, shares, head) for shares in (True, False))
    assert shared.keys() == unshared.keys()
    largest = max(float(x.abs().max()) for name, x in unshared.items() if name.endswith("weight"))
    for name, expected in unshared.items():
        scale = largest if "." in name else float(expected.abs().max().clamp(min=1e-3))
        assert float((shared[name] - expected).abs().max()) <= within * scale, name


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_log_probs_entropies_and_gradients_equal_those_of_whole_sequences(family, batch):
    assert_same(tiny_model(family), BATCHES[batch])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_values_equal_those_of_whole_sequences(family):
    for sequences in BATCHES.values():
        assert_same(tiny_model(family, head="value"), sequences, head="value")


tries = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=8), min_size=2, max_size=7)


@given(tries, st.sampled_from(["llama", "gemma2", "gpt2"]))
def test_any_trie_gives_the_results_of_whole_sequences(sequences, family):
    if any(len(sequence) > 1 for sequence in sequences):
        assert_same(tiny_model(family), sequences)


# -- products --------------------------------------------------------------------------------------

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attended(query, key, value, *others, **named):
    return sdpa_flop_count(query, key, value)


def _attended_backward(grad, query, key, value, *others, **named):
    """Scores are recomputed, and each of four products gives a gradient."""
    return sdpa_flop_count(query, key, value) * 5 // 2


def flops(lm, sequences, shares):
    counter = FlopCounterMode(
        display=False, custom_mapping={FORWARD: _attended, BACKWARD: _attended_backward}
    )
    with counter:
        quantities(lm, sequences, shares)
    return counter.get_total_flops()


def least_flops(lm, sequences):
    """Of the distinct pasts of a batch, forward and backward: the products of a token with the
    matrices of all layers and with the head, and of its query with the keys and values of its
    past."""
    config = lm.config
    pasts = Counter(tuple(s[: i + 1]) for s in sequences for i in range(len(s)))
    linear = sum(m.weight.numel() for m in lm.model.modules() if isinstance(m, nn.Linear))
    head = lm.get_output_embeddings().weight.numel()
    keys = sum(map(len, pasts)) * config.num_attention_heads * config.head_dim
    layers = config.num_hidden_layers
    return len(pasts) * 6 * (linear + head) + 14 * layers * keys


def test_counted_products_are_the_least_that_the_trie_takes():
    lm = tiny_model(
        "llama", hidden_size=128, intermediate_size=384, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    batch = [text for seed in range(3) for text in group(*[16] * 8, prompt=48, seed=seed)]
    least = least_flops(lm, batch)
    assert flops(lm, batch, shares=True) <= 1.05 * least
    assert flops(lm, batch, shares=False) > 2.5 * least


def test_two_batches_that_share_nothing_take_the_same_products():
    lm = tiny_model("llama")
    apart = [[number, *text] for number, text in enumerate(group(4, 7, 1), start=3)]
    assert flops(lm, apart, shares=True) == flops(lm, apart, shares=False)


# -- engines ---------------------------------------------------------------------------------------


class Subject(BackendContract):
    name = "fsdp"


def rows_computed(engine, sample=None, **arguments):
    """The tokens that the layers compute with, in each forward pass of a step."""
    seen = []
    engine.lm.base_model.layers[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].shape[1])
    )
    engine.train_batch(
        groups() if sample is None else sample,
        answer_loss,
        answer_weight,
        cut="sequence",
        **arguments,
    )
    return seen


TOKENS = sum(groups().flat_seqlens("packed_input_ids"))
DISTINCT = 24 + 3 + 7 + (2 + 7) + 17 + 5 + 2


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_engine_computes_a_prompt_once(family):
    assert rows_computed(Subject().engine(family)) == [DISTINCT]


@pytest.mark.parametrize(("device", "skips_hidden"), [("cpu", False), ("cuda", True)])
def test_what_pays_follows_from_the_products_of_tokens_and_of_pairs(device, skips_hidden):
    sharing = PrefixSharing.of(Products(1.0, 2.0, 3.0), torch.device(device), None)
    assert sharing.work == Work(of_token=1.0, of_key=2.0, skips_hidden=skips_hidden)


def test_the_setting_turns_sharing_off():
    assert rows_computed(Subject().engine(share_prefixes=False)) == [TOKENS]


def test_router_losses_count_the_tokens_of_every_sequence():
    engine = Subject().engine("mixtral", router_aux_loss_coef=0.1)
    assert rows_computed(engine) == [TOKENS]


def test_replayed_experts_are_those_of_every_sequence():
    engine, sample = Subject().engine("mixtral"), groups()
    lengths = [[n - 1 for n in of] for of in sample.seqlens["packed_input_ids"]]
    routes = torch.zeros(sum(map(sum, lengths)), 2, 2, dtype=torch.uint8)
    routes[..., 1] = 1
    sample.update_(
        SequenceSample(
            ids=sample.ids, seqlens={"routed_experts": lengths}, data={"routed_experts": routes}
        )
    )
    assert rows_computed(engine, sample) == [TOKENS]


def test_recomputed_layers_share_as_others_do():
    engine, plain = (
        Subject().engine(gradient_checkpointing=recomputes) for recomputes in (True, False)
    )
    stats = [e.train_batch(groups(), answer_loss, answer_weight) for e in (engine, plain)]
    assert stats[0] == pytest.approx(stats[1], rel=1e-6)


def test_sequences_of_a_group_stay_in_one_micro_batch_and_count_what_they_share_once():
    """A group of 82 tokens of which 34 are distinct; copies of the other 48 count an eighth."""
    seen = rows_computed(Subject().engine(), mb_spec=MicroBatchSpec(max_tokens_per_mb=42))
    assert sorted(seen) == [33, 34]
    unshared = rows_computed(
        Subject().engine(share_prefixes=False), mb_spec=MicroBatchSpec(max_tokens_per_mb=42)
    )
    assert len(unshared) == 4
    assert sum(unshared) == TOKENS


def test_a_group_that_exceeds_a_micro_batch_is_cut_and_not_refused():
    seen = rows_computed(Subject().engine(), mb_spec=MicroBatchSpec(max_tokens_per_mb=31))
    assert max(seen) <= 31
    assert sum(seen) > DISTINCT


def test_the_number_of_micro_batches_that_is_asked_for_is_made():
    seen = rows_computed(Subject().engine(), mb_spec=MicroBatchSpec(n_mbs=5))
    assert len(seen) == 5


def stepped(mesh=None, share=None, **arguments):
    """The stats of a step on a rank's `share` of the samples, and the weights after it."""
    engine = Subject().engine(mesh=mesh, **SETTINGS)
    sample = groups() if share is None else groups().select_indices(share)
    stats = engine.train_batch(sample, answer_loss, answer_weight, cut="sequence", **arguments)
    return stats, Subject().weights(engine)


@pytest.mark.parametrize("cap", [31, 42, 60])
def test_a_step_does_not_depend_on_how_groups_are_cut(cap):
    expected, weights = stepped()
    stats, weights_when_cut = stepped(mb_spec=MicroBatchSpec(max_tokens_per_mb=cap))
    assert stats == pytest.approx(expected, rel=1e-5)
    assert weights_apart(weights_when_cut, weights) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"cp": 2}], ids=str)
def test_a_step_on_ranks_is_that_of_one_rank(layout):
    """Context-parallel ranks share sequences, and compute each as a whole."""
    expected, weights = stepped()

    def work(rank):
        replicas, ranks = layout.get("dp", 1), ranks_in(layout)
        replica = rank * replicas // ranks
        share = [[0, 1, 2], [0], [1, 2]][replicas - 1 + replica]
        stats, of_rank = stepped(mesh_of_ranks(**layout), share)
        apart = weights_apart(of_rank, weights)
        return {"apart": apart, "loss": stats["loss"], "grad_norm": stats["grad_norm"]}

    for rank in run_on_ranks(ranks_in(layout), work, timeout=120):
        assert rank["apart"] < 1e-5
        for name in ("loss", "grad_norm"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-5)
