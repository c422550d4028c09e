"""Models from folders and from scratch: what is read, what is refused, and which weights roles
share at the start."""

import json
import pickle
import shutil

import pytest
import torch
from heard_work import heard_work
from hub_server import hub_with
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import AutoConfig, PreTrainedTokenizerFast

from rlcli.api import headway
from rlcli.api.config import FinetuneSpec
from rlcli.api.headway import BYTES, Count, doing
from rlcli.api.model_folder import check_folder, check_sizes, download_counter
from rlcli.api.model_skeleton import without_dropout
from rlcli.api.model_source import open_source
from rlcli.api.token_texts import id_count
from rlcli.api.value_model import value_head
from rlcli.checkpoint.huggingface import load_tokenizer
from rlcli.errors import ModelError
from rlcli.recipe.dataset_sizes import training_steps
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.roles import build_roles, role_source
from rlcli.testing.tiny_models import VOCABULARY, tiny_config, tiny_model
from rlcli.topology import plan_topology
from rlcli.topology.configs import vocabulary_of

WEIGHTS = "model.safetensors"
SCRATCH = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def load_model(origin, **settings):
    """The full model in this process."""
    return open_source(origin, **settings).load(torch.device("cpu"))


def word_tokenizer(count):
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, count)}}
    model = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(attention_dropout=0.1).save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def edit_json(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_folder_is_read_unchanged_except_for_dropout(saved):
    model = load_model(str(saved), head="lm", tokenizer=load_tokenizer(str(saved)), seed=1)
    assert same_weights(model, tiny_model())
    assert model.config.attention_dropout == 0
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["biogpt", "gpt2", "opt", "starcoder2", "xglm"])
def test_dropout_is_off_whatever_a_family_calls_it(family):
    drawn = AutoConfig.for_model(family)
    if hasattr(drawn, "layerdrop"):
        drawn.layerdrop = 0.5
    config = without_dropout(drawn).to_dict()
    rates = {n: rate for n, rate in config.items() if "drop" in n and not isinstance(rate, bool)}
    assert len(rates) > 1
    assert set(rates.values()) == {0.0}, rates


CRITICS = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "cohere", "granite", "olmo2")
"""Families with a token classification model in transformers, under various head names,
or without one."""


@pytest.mark.parametrize("family", CRITICS)
def test_a_missing_value_head_starts_at_zero(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "actor")
    model = load_model(str(tmp_path / "actor"), head="value", tokenizer=None, seed=1)
    assert same_weights(model.base_model, tiny_model(family).base_model)
    assert value_head(model).weight.shape[0] == 1
    assert not any(p.any() for p in value_head(model).parameters())


@pytest.mark.parametrize("family", CRITICS)
def test_a_trained_value_head_is_kept(family, tmp_path):
    tiny_model(family, head="value").save_pretrained(tmp_path / "critic")
    model = load_model(str(tmp_path / "critic"), head="value", tokenizer=None, seed=1)
    assert same_weights(model, tiny_model(family, head="value"))
    assert value_head(model).weight.any()


def test_a_critic_is_not_read_as_a_language_model(tmp_path):
    tiny_model(head="value").save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match="LlamaForTokenClassification, which gives numbers"):
        load_model(str(tmp_path / "critic"), head="lm", tokenizer=None, seed=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_reward_model_keeps_its_head_weight_and_gets_a_zero_bias(family, tmp_path):
    from transformers import AutoModelForSequenceClassification

    reward = AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=1))
    reward.save_pretrained(tmp_path / "reward")
    model = load_model(str(tmp_path / "reward"), head="value", tokenizer=None, seed=1)
    assert torch.equal(value_head(model).weight, reward.score.weight)
    assert not value_head(model).bias.any()


def test_a_role_with_values_that_nothing_trains_needs_a_head(saved, tmp_path):
    """A head under a name that transformers does not know counts as none: all rewards were 0."""
    tiny_model(head="value").save_pretrained(tmp_path / "trained")
    trained, untrained = (
        load_recipe("rlhf_arithmetic", [f"models.reward.path={folder}"]).recipe
        for folder in (tmp_path / "trained", saved)
    )
    assert role_source(trained, "reward", None).head == "value"
    with pytest.raises(ModelError, match="role reward, which nothing trains, would give every"):
        role_source(untrained, "reward", None)


def test_random_weights_depend_only_on_the_seed():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, second, other_seed = (
        load_model(SCRATCH, head="lm", tokenizer=word_tokenizer(20), seed=seed)
        for seed in (7, 7, 8)
    )
    assert same_weights(first, second)
    assert not same_weights(first, other_seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.config.vocab_size == 20
    assert (first.config.eos_token_id, first.config.pad_token_id) == (1, 0)


@pytest.mark.parametrize("family", ["llama", "cohere", "granite", "olmo2"])
def test_a_critic_from_scratch_has_the_backbone_of_the_actor(family):
    scratch = {**SCRATCH, "model_type": family}
    actor, critic = (
        load_model(scratch, head=head, tokenizer=word_tokenizer(20), seed=7)
        for head in ("lm", "value")
    )
    assert same_weights(actor.base_model, critic.base_model)
    assert not any(p.any() for p in value_head(critic).parameters())


def test_roles_initialised_from_the_same_role_share_its_weights():
    """Otherwise the KL divergence from the reference would not start at 0."""
    recipe = load_recipe(
        "ppo_math",
        [
            "models.actor.path=null",
            f"models.actor.scratch={json.dumps(SCRATCH)}",
            "models.actor.tokenizer=builtin:arithmetic",
            "cluster.device=cpu",
            "checkpoint.save_dtype=bfloat16",
        ],
    ).recipe
    spec = FinetuneSpec(total_train_steps=1, dataset_size=1, train_batch_size=1)
    built = build_roles(recipe, plan_topology(recipe), 0, torch.device("cpu"), {}, spec)
    models = {
        name: model.module.lm for name, (model, _) in built.items() if model.module is not None
    }
    assert same_weights(models["actor"], models["ref"])
    assert same_weights(models["actor"].base_model, models["critic"].base_model)
    reward = built["reward"][0]
    assert reward.module is None
    assert len(reward.tokenizer) == len(built["actor"][0].tokenizer)
    assert built["actor"][0].seed == built["critic"][0].seed == recipe.seed
    assert built["actor"][0].role_seed != built["critic"][0].role_seed
    assert built["actor"][0].module.save_dtype == torch.bfloat16


def test_a_role_knows_how_many_calls_train_it_in_a_step():
    again = "graph.again={model: actor, call: train_step, interface: sft}"
    recipe = load_recipe(
        "sft_math", [f"models.actor.scratch={json.dumps(SCRATCH)}", "cluster.device=cpu", again]
    ).recipe
    spec = FinetuneSpec(total_train_steps=1, dataset_size=1, train_batch_size=1)
    built = build_roles(recipe, plan_topology(recipe), 0, torch.device("cpu"), {}, spec)
    assert built["actor"][0].updates_per_step == 2


def test_epochs_are_converted_to_steps():
    recipe = load_recipe(
        "sft_math", ["train.steps=null", "train.epochs=3", "train.prompts_per_step=10"]
    ).recipe
    assert training_steps(recipe, {"train": 25}) == 8


def test_ids_that_a_tokenizer_skips_have_rows(tmp_path):
    vocabulary = {"<pad>": 0, **{f"w{i}": i for i in range(1, 10)}, "<eos>": 20}
    words = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    assert (len(tokenizer), id_count(tokenizer), vocabulary_of(str(tmp_path))) == (11, 21, 21)
    model = load_model(SCRATCH, head="lm", tokenizer=tokenizer, seed=1)
    assert len(model.lm_head.weight) == 21
    with pytest.raises(ModelError, match=r"21 tokens.*20 rows"):
        load_model({**SCRATCH, "vocab_size": 20}, head="lm", tokenizer=tokenizer, seed=1)


# -- refused ---------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    word_tokenizer(VOCABULARY + 10).save_pretrained(folder)
    with pytest.raises(ModelError, match=f"{VOCABULARY + 10} tokens.*{VOCABULARY} rows") as raised:
        load_model(str(folder), head="lm", tokenizer=load_tokenizer(str(folder)), seed=1)
    assert raised.value.code == "F32"
    with pytest.raises(ModelError, match=f"{VOCABULARY + 10} tokens.*{VOCABULARY} rows"):
        check_sizes(folder, folder)


def test_an_embedding_larger_than_the_tokenizer_is_accepted(folder):
    word_tokenizer(VOCABULARY - 10).save_pretrained(folder)
    check_sizes(folder, folder)
    assert load_model(str(folder), head="lm", tokenizer=load_tokenizer(str(folder)), seed=1)


@pytest.mark.parametrize(("file", "entries"), [
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
    ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}),
    ("config.json", {"_attn_implementation_internal": "somebody/kernel"}),
    ("config.json", {"attn_implementation": "somebody/kernel"}),
    ("config.json", {"custom_code": True}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
    ("tokenizer_config.json", {"trust_remote_code": True}),
])  # fmt: skip
def test_models_with_custom_code_are_refused_without_running_it(folder, file, entries):
    canary = folder.parent / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    edit_json(folder / file, **entries)
    loads = (
        lambda: load_model(str(folder), head="lm", tokenizer=None, seed=1),
        lambda: load_tokenizer(str(folder)),
    )
    for load in loads:
        with pytest.raises(ModelError) as raised:
            load()
        assert raised.value.code == "S6"
        assert str(folder / file) in raised.value.what
    assert not canary.exists()


class Canary:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_torch_load_is_never_called(folder, monkeypatch):
    """Neither by a load that succeeds, nor for a folder with pickles under any of their usual
    names."""
    called = []
    monkeypatch.setattr(torch, "load", lambda *args, **_: called.append(args))
    for head in ("lm", "value"):
        assert load_model(str(folder), head=head, tokenizer=load_tokenizer(str(folder)), seed=1)
    canary = folder.parent / "canary"
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "scheduler.pt"):
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    assert load_model(str(folder), head="lm", tokenizer=None, seed=1)
    weights = (folder / WEIGHTS).read_bytes()
    index = folder / "model.safetensors.index.json"
    for damage in (
        lambda: (folder / "adapter_config.json").write_text("{}"),
        lambda: index.write_text('{"weight_map": {"a": "pytorch_model.bin"}}'),
        lambda: (folder / WEIGHTS).unlink(),
        lambda: (folder / "other.safetensors").write_bytes(weights),
    ):
        damage()
        with pytest.raises(ModelError):
            load_model(str(folder), head="lm", tokenizer=None, seed=1)
        (folder / "adapter_config.json").unlink(missing_ok=True)
    assert called == []
    assert not canary.exists()


def test_harmless_settings_of_other_versions_are_accepted(folder):
    edit_json(
        folder / "config.json",
        _attn_implementation_autoset=True,
        attn_implementation="sdpa",
        auto_map=None,
    )
    check_folder(folder, weights=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_weights_in_other_formats_are_refused(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not read")
    with pytest.raises(ModelError, match=name) as raised:
        load_model(str(folder), head="lm", tokenizer=None, seed=1)
    assert "save_pretrained" in raised.value.hint


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "not readable JSON"),
    (lambda f: edit_json(f / "config.json", model_type="nobody-knows"), "cannot be loaded"),
    (lambda f: edit_json(f / "config.json", num_hidden_layers=3), "lack"),
    (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]),
     "not a valid safetensors file"),
    (lambda f: (f / WEIGHTS).write_bytes(b""), "not a valid safetensors file"),
])  # fmt: skip
def test_the_error_for_a_broken_folder_names_cause_and_folder(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(str(folder), head="lm", tokenizer=None, seed=1)
    assert str(folder) in str(raised.value)


def test_weights_that_config_json_does_not_describe_are_warned_about(tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama", attention_bias=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_model(str(tmp_path), head="lm", tokenizer=None, seed=1)
    assert not caplog.text
    edit_json(tmp_path / "config.json", attention_bias=False)
    load_model(str(tmp_path), head="lm", tokenizer=None, seed=1)
    layers = config.num_hidden_layers
    assert f"holds {4 * layers} tensors for which its config.json leaves no place" in caplog.text
    assert "model.layers.0.self_attn.k_proj.bias" in caplog.text


def test_a_folder_without_a_tokenizer_is_refused(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer can be read"):
        load_tokenizer(str(folder))


def test_a_missing_folder_is_refused():
    with pytest.raises(ModelError, match="not a folder with a model"):
        load_model("./nowhere", head="lm", tokenizer=None, seed=1)


def test_only_data_files_are_downloaded_from_the_hub(monkeypatch, saved):
    import huggingface_hub

    downloads = []

    def download(source, allow_patterns, tqdm_class):
        downloads.append((source, allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert same_weights(
        load_model("somebody/model", head="lm", tokenizer=None, seed=1), tiny_model()
    )
    load_tokenizer("somebody/model")
    assert [source for source, _ in downloads] == ["somebody/model"] * 2
    assert not any(
        pattern.endswith((".py", ".bin", ".pt")) or pattern == "*"
        for _, ps in downloads
        for pattern in ps
    )
    assert not any("safetensors" in pattern for pattern in downloads[1][1])


def test_the_bytes_of_weights_are_counted_as_they_are_loaded(saved):
    with heard_work() as heard:
        model = load_model(str(saved), head="lm", tokenizer=None, seed=1)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert heard.phases == ["loading weights", ""]
    assert heard.counts[-1] == Count(size, size, BYTES)


def test_a_download_counts_the_bytes_on_disk(tmp_path, monkeypatch, capfd):
    """The Hub's library, and a Hub on this machine."""
    from huggingface_hub import snapshot_download

    monkeypatch.setattr(headway, "APART", 0.0)
    files = {f"{number}.json": b"%d" % number * 100_000 for number in range(3)}
    with hub_with("a/b", files) as hub, heard_work() as heard, doing("", unit=BYTES) as work:
        location = {"repo_type": "dataset", "endpoint": hub, "cache_dir": tmp_path}
        snapshot_download("a/b", **location, tqdm_class=download_counter(work))
    assert heard.counts[-1] == Count(300_000, 300_000, BYTES)
    assert capfd.readouterr() == ("", "")


def test_invalid_settings_of_a_model_from_scratch_are_refused():
    with pytest.raises(ModelError, match="no llama model can be made"):
        load_model(
            {**SCRATCH, "num_attention_heads": 3}, head="lm", tokenizer=word_tokenizer(20), seed=1
        )
