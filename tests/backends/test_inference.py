"""inference: the contract, for more families too, what its engine refuses, a full disk,
and matrices in bfloat16."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file

from rlcli.api.memory import PlacedRole
from rlcli.api.model import ForwardEngine, GenerationEngine, TrainEngine
from rlcli.backends._memory import InferenceMemory
from rlcli.disk_errors import explain_disk_errors
from rlcli.errors import ModelError, ResourceError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.forward import ForwardChecks
from rlcli.testing.backend.generation import BackendGenerationChecks, generate
from rlcli.testing.backend.samples import batch
from rlcli.testing.backend.state import StateChecks
from rlcli.testing.tiny_models import VOCABULARY, TinyTokenizer, tiny_model
from rlcli.topology.architecture import read_architecture


class FSDPEngines(BackendContract):
    """Engines that keep float32 weights and leave the cast to autocast."""

    name = "fsdp"
    __test__ = False


class TestContract(BackendContract):
    name = "inference"
    families = ("llama", "gpt2", "gemma2")


@pytest.mark.exhaustive
class TestOtherFamilies(StateChecks, BackendGenerationChecks, ForwardChecks):
    name = "inference"
    families = (
        "qwen2",
        "qwen3",
        "mistral",
        "gemma3_text",
        "gpt_neox",
        "cohere",
        "granite",
        "olmo2",
    )


def test_the_engine_scores_and_generates_but_does_not_train():
    engine = TestContract().engine()
    assert isinstance(engine, ForwardEngine)
    assert isinstance(engine, GenerationEngine)
    assert not isinstance(engine, TrainEngine)


def test_a_model_is_saved_in_its_original_dtype(tmp_path):
    engine = TestContract().engine(lm=tiny_model().bfloat16())
    assert {parameter.dtype for parameter in engine.lm.parameters()} == {torch.float32}
    engine.save_to_hf(None, str(tmp_path / "actor"))
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "actor" / "model.safetensors").values()
    } == {torch.bfloat16}
    assert json.loads((tmp_path / "actor" / "config.json").read_text())["dtype"] == "bfloat16"


class WithGap(TinyTokenizer):
    """Most ids have no token; those of the special tokens come last."""

    eos_token_id = VOCABULARY - 1
    added_tokens_decoder = {eos_token_id: None}

    def __len__(self):
        return 10


def test_an_end_token_after_ids_without_tokens_is_sampled():
    lm = tiny_model(tie_word_embeddings=False)
    torch.nn.init.zeros_(lm.lm_head.weight)  # all tokens are equally likely
    engine = TestContract().engine(lm=lm, tokenizer=WithGap())
    drawn = torch.cat(generate(engine, responses_per_prompt=256).tokens)
    assert WithGap.eos_token_id in drawn


def test_log_probs_of_a_value_head_are_refused():
    with pytest.raises(ModelError, match="language-model head"):
        TestContract().engine(head="value").forward(
            batch(), post_hook=lambda output, _: output.logprobs
        )


def test_lengths_beyond_the_positions_of_the_model_are_refused():
    with pytest.raises(ModelError, match="128 positions"):
        generate(TestContract().engine(), max_new_tokens=200)


def test_a_full_disk_leaves_the_previous_folder_unchanged(tmp_path):
    engine = TestContract().engine()
    engine.save_to_hf(None, str(tmp_path / "actor"))
    before = (tmp_path / "actor" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ResourceError) as caught, explain_disk_errors(tmp_path):
            engine.save_to_hf(None, str(tmp_path / "actor"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == "F28"
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert (tmp_path / "actor" / "model.safetensors").read_bytes() == before


# -- matrices in bfloat16 --------------------------------------------------------------------------


def parameter_dtypes(engine) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in engine.lm.named_parameters()}


def test_bfloat16_is_used_for_matrices_of_linear_layers_only():
    types = parameter_dtypes(TestContract().engine(dtype="bfloat16"))
    narrow = {name for name, dtype in types.items() if dtype is torch.bfloat16}
    assert narrow == {
        name for name in types if name.endswith("_proj.weight") or name == "lm_head.weight"
    }
    for dtype in ("auto", "float32"):
        assert set(parameter_dtypes(TestContract().engine(dtype=dtype)).values()) == {torch.float32}
    assert set(parameter_dtypes(TestContract().engine("gpt2", dtype="bfloat16")).values()) == {
        torch.float32
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox", "cohere", "olmo2"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_matrices_in_bfloat16_give_the_same_outputs_as_autocast(family, head):
    def output(contract: type[BackendContract]) -> torch.Tensor:
        engine, samples = contract().engine(family, head=head, dtype="bfloat16"), batch()
        if head == "value":
            return engine.forward(samples, post_hook=lambda output, _: output.values)
        scored = [
            [length - 1 for length in lengths] for lengths in samples.seqlens["packed_input_ids"]
        ]
        return engine.forward(
            samples, post_hook=lambda output, _: output.logprobs, output_seqlens=scored
        )

    assert torch.equal(output(TestContract), output(FSDPEngines))


def test_matrices_in_bfloat16_give_the_same_responses_as_autocast():
    ours, autocast = (
        generate(contract().engine(dtype="bfloat16")) for contract in (TestContract, FSDPEngines)
    )
    assert [list(one) for one in ours.tokens] == [list(one) for one in autocast.tokens]


def test_followed_weights_equal_the_source_cast_to_bfloat16():
    source = TestContract().engine(seed=1)
    follower = TestContract().engine(dtype="bfloat16")
    follower.take_parameters(source, 1.0)
    source_weights = dict(source.lm.named_parameters())
    for name, weight in follower.lm.named_parameters():
        assert torch.equal(weight, source_weights[name].to(weight.dtype))


def test_planned_weights_equal_the_memory_of_the_engine():
    for family, head in (("llama", "lm"), ("llama", "value"), ("qwen2", "lm"), ("gpt2", "lm")):
        engine = TestContract().engine(family, head=head, dtype="bfloat16")
        sizes = read_architecture(engine.lm.config.to_dict())
        mesh = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1}
        role = PlacedRole(sizes, head, mesh, {"dtype": "bfloat16"}, ("inference",), 64, "cuda")
        size = sum(parameter.nbytes for parameter in engine.lm.parameters())
        # biases stay in float32
        assert InferenceMemory(role).resident().weights == pytest.approx(size, rel=0.02)
