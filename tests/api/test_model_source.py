"""Models from folders and from nothing: what is read, what is refused, what roles that belong together share."""

import json
import pickle
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from rlcli.api.config import FinetuneSpec
from rlcli.api.model_folder import check_folder, check_sizes
from rlcli.api.model_source import open_source
from rlcli.api.value_model import value_head
from rlcli.checkpoint.huggingface import load_tokenizer
from rlcli.errors import ModelError
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.roles import build_roles, training_steps
from rlcli.testing.tiny_models import VOCABULARY, tiny_config, tiny_model
from rlcli.topology import plan_topology

WEIGHTS = "model.safetensors"
SCRATCH = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
           "num_attention_heads": 2}  # fmt: skip


def loaded(origin, **settings):
    """The whole model on this one process."""
    return open_source(origin, **settings).load(torch.device("cpu"))


def words(count):
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, count)}}
    made = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(attention_dropout=0.1).save_pretrained(folder)
    words(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "copy")


def change(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_folder_is_read_as_it_was_written_without_dropout(saved):
    model = loaded(str(saved), head="lm", tokenizer=load_tokenizer(str(saved)), seed=1)
    assert same(model, tiny_model())
    assert model.config.attention_dropout == 0
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


CRITICS = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "cohere", "granite", "olmo2")
"""Families that transformers has a model with a number per token for, under several names, or has none for."""


@pytest.mark.parametrize("family", CRITICS)
def test_a_value_head_that_the_folder_lacks_starts_at_zero(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "actor")
    model = loaded(str(tmp_path / "actor"), head="value", tokenizer=None, seed=1)
    assert same(model.base_model, tiny_model(family).base_model)
    assert value_head(model).weight.shape[0] == 1
    assert not any(p.any() for p in value_head(model).parameters())


@pytest.mark.parametrize("family", CRITICS)
def test_a_value_head_that_was_trained_is_kept(family, tmp_path):
    tiny_model(family, head="value").save_pretrained(tmp_path / "critic")
    model = loaded(str(tmp_path / "critic"), head="value", tokenizer=None, seed=1)
    assert same(model, tiny_model(family, head="value"))
    assert value_head(model).weight.any()


def test_of_a_reward_models_head_only_what_it_lacks_starts_at_zero(tmp_path):
    from transformers import AutoModelForSequenceClassification

    reward = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    reward.save_pretrained(tmp_path / "reward")
    model = loaded(str(tmp_path / "reward"), head="value", tokenizer=None, seed=1)
    assert torch.equal(value_head(model).weight, reward.score.weight)
    assert not value_head(model).bias.any()


def test_random_weights_are_a_function_of_the_seed():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, two, other = (loaded(SCRATCH, head="lm", tokenizer=words(20), seed=seed) for seed in (7, 7, 8))
    assert same(one, two)
    assert not same(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.config.vocab_size == 20
    assert (one.config.eos_token_id, one.config.pad_token_id) == (1, 0)


@pytest.mark.parametrize("family", ["llama", "cohere", "granite", "olmo2"])
def test_a_critic_from_scratch_has_the_backbone_of_the_actor(family):
    scratch = {**SCRATCH, "model_type": family}
    actor, critic = (loaded(scratch, head=head, tokenizer=words(20), seed=7) for head in ("lm", "value"))
    assert same(actor.base_model, critic.base_model)
    assert not any(p.any() for p in value_head(critic).parameters())


def test_roles_that_start_from_one_role_start_alike():
    """Or the KL from the reference would not begin at 0."""
    recipe = load_recipe("ppo_math", [
        "models.actor.path=null", f"models.actor.scratch={json.dumps(SCRATCH)}",
        "models.actor.tokenizer=builtin:arithmetic", "cluster.device=cpu", "checkpoint.save_dtype=bfloat16",
    ]).recipe  # fmt: skip
    spec = FinetuneSpec(total_train_steps=1, dataset_size=1, train_batch_size=1)
    built = build_roles(recipe, plan_topology(recipe), 0, torch.device("cpu"), {}, spec)
    models = {name: model.module.lm for name, (model, _) in built.items() if model.module is not None}
    assert same(models["actor"], models["ref"])
    assert same(models["actor"].base_model, models["critic"].base_model)
    reward = built["reward"][0]
    assert reward.module is None
    assert len(reward.tokenizer) == len(built["actor"][0].tokenizer)
    assert built["actor"][0].seed == built["critic"][0].seed == recipe.seed
    assert built["actor"][0].role_seed != built["critic"][0].role_seed
    assert built["actor"][0].module.save_dtype == torch.bfloat16


def test_epochs_become_steps():
    recipe = load_recipe("sft_math", ["train.steps=null", "train.epochs=3", "train.prompts_per_step=10"]).recipe
    assert training_steps(recipe, {"train": 25}) == 8


# -- refused -------------------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_embedding(folder):
    words(VOCABULARY + 10).save_pretrained(folder)
    with pytest.raises(ModelError, match=f"{VOCABULARY + 10} tokens.*{VOCABULARY} rows") as raised:
        loaded(str(folder), head="lm", tokenizer=load_tokenizer(str(folder)), seed=1)
    assert raised.value.code == "F32"
    with pytest.raises(ModelError, match=f"{VOCABULARY + 10} tokens.*{VOCABULARY} rows"):
        check_sizes(folder, folder)


def test_a_padded_embedding_is_fine(folder):
    words(VOCABULARY - 10).save_pretrained(folder)
    check_sizes(folder, folder)
    assert loaded(str(folder), head="lm", tokenizer=load_tokenizer(str(folder)), seed=1)


@pytest.mark.parametrize(("file", "entries"), [
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
    ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}),
    ("config.json", {"_attn_implementation_internal": "somebody/kernel"}),
    ("config.json", {"attn_implementation": "somebody/kernel"}),
    ("config.json", {"custom_code": True}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
    ("tokenizer_config.json", {"trust_remote_code": True}),
])  # fmt: skip
def test_models_that_bring_code_are_refused_and_it_is_not_run(folder, file, entries):
    canary = folder.parent / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    change(folder / file, **entries)
    loads = (lambda: loaded(str(folder), head="lm", tokenizer=None, seed=1), lambda: load_tokenizer(str(folder)))
    for load in loads:
        with pytest.raises(ModelError) as raised:
            load()
        assert raised.value.code == "S6"
        assert str(folder / file) in raised.value.what
    assert not canary.exists()


class Canary:
    """What a pickle of it does when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_no_way_leads_to_torch_load(folder, monkeypatch):
    """Neither a load that succeeds, nor one of a folder that brings pickles in any of the places where they may be."""
    called = []
    monkeypatch.setattr(torch, "load", lambda *args, **_: called.append(args))
    for head in ("lm", "value"):
        assert loaded(str(folder), head=head, tokenizer=load_tokenizer(str(folder)), seed=1)
    canary = folder.parent / "canary"
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "scheduler.pt"):
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    assert loaded(str(folder), head="lm", tokenizer=None, seed=1)
    weights = (folder / WEIGHTS).read_bytes()
    index = folder / "model.safetensors.index.json"
    for spoil in (
        lambda: (folder / "adapter_config.json").write_text("{}"),
        lambda: index.write_text('{"weight_map": {"a": "pytorch_model.bin"}}'),
        lambda: (folder / WEIGHTS).unlink(),
        lambda: (folder / "other.safetensors").write_bytes(weights),
    ):
        spoil()
        with pytest.raises(ModelError):
            loaded(str(folder), head="lm", tokenizer=None, seed=1)
        (folder / "adapter_config.json").unlink(missing_ok=True)
    assert called == []
    assert not canary.exists()


def test_harmless_leftovers_of_other_versions_are_no_code(folder):
    change(folder / "config.json", _attn_implementation_autoset=True, attn_implementation="sdpa", auto_map=None)
    check_folder(folder, weights=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_weights_in_other_formats_are_refused_unread(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not read")
    with pytest.raises(ModelError, match=name) as raised:
        loaded(str(folder), head="lm", tokenizer=None, seed=1)
    assert "save_pretrained" in raised.value.hint


@pytest.mark.parametrize(("spoil", "words_"), [
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "not readable JSON"),
    (lambda f: change(f / "config.json", model_type="nobody-knows"), "cannot be loaded"),
    (lambda f: change(f / "config.json", num_hidden_layers=3), "lack"),
    (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "not a valid safetensors file"),
    (lambda f: (f / WEIGHTS).write_bytes(b""), "not a valid safetensors file"),
])  # fmt: skip
def test_a_broken_folder_is_one_clear_error(folder, spoil, words_):
    spoil(folder)
    with pytest.raises(ModelError, match=words_) as raised:
        loaded(str(folder), head="lm", tokenizer=None, seed=1)
    assert str(folder) in str(raised.value)


def test_a_folder_without_a_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer can be read"):
        load_tokenizer(str(folder))


def test_a_folder_that_is_not_there():
    with pytest.raises(ModelError, match="not a folder with a model"):
        loaded("./nowhere", head="lm", tokenizer=None, seed=1)


def test_the_hub_is_asked_for_data_only(monkeypatch, saved):
    import huggingface_hub

    asked = []

    def download(source, allow_patterns):
        asked.append((source, allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert same(loaded("somebody/model", head="lm", tokenizer=None, seed=1), tiny_model())
    load_tokenizer("somebody/model")
    assert [source for source, _ in asked] == ["somebody/model"] * 2
    assert not any(pattern.endswith((".py", ".bin", ".pt")) or pattern == "*" for _, ps in asked for pattern in ps)
    assert not any("safetensors" in pattern for pattern in asked[1][1])


def test_settings_that_make_no_model():
    with pytest.raises(ModelError, match="no llama model can be made"):
        loaded({**SCRATCH, "num_attention_heads": 3}, head="lm", tokenizer=words(20), seed=1)
