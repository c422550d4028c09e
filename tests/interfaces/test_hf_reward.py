"""The sentiment example: a classifier with its own tokenizer as the reward,
compared with transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import DataError, ModelError
from rlcli.interfaces.rewards.hf_reward import HFRewardInterface
from rlcli.testing.batches import DigitTokenizer
from rlcli.testing.interface import InterfaceContract

WORDS = ["[PAD]", "[UNK]", "[EOS]", "a", "good", "bad", "film", "very", "dull", "so"]
ROLE_WORDS = ["<eos>", "so", "film", "good", "bad", "very", "a", "dull"]


def word_tokenizer(words, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def bert(labels=3, vocabulary=12):
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=labels,
    )
    if labels == 3:
        config.id2label = {0: "negative", 1: "neutral", 2: "positive"}
        config.label2id = {name: i for i, name in config.id2label.items()}
    return BertForSequenceClassification(config)


def roberta(padding=0):
    config = RobertaConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        pad_token_id=padding,
    )
    return RobertaForSequenceClassification(config)


def gpt2():
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 1}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=len(WORDS), **settings))


def xlnet():
    settings = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "num_labels": 1}
    return XLNetForSequenceClassification(XLNetConfig(vocab_size=len(WORDS), **settings))


def llama(padding=None):
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=padding,
    )
    return LlamaForSequenceClassification(config)


def saved(folder, make, words=WORDS, padding="[PAD]"):
    torch.manual_seed(0)
    make().save_pretrained(folder)
    special = {"pad_token": padding} if padding and make is not llama else {}
    word_tokenizer(words, unk_token="[UNK]", eos_token="[EOS]", **special).save_pretrained(folder)
    return str(folder)


TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {{ eos_token }} "
    "{% endfor %}"
)


def with_template(path, template=TEMPLATE):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def with_special_tokens(path):
    """The tokenizer then puts [EOS] before and after a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[EOS] $A [EOS]", special_tokens=[("[EOS]", WORDS.index("[EOS]"))]
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def digit_classifier(tmp_path_factory):
    path = saved(tmp_path_factory.mktemp("classifier"), bert, [*WORDS[:3], *"012345678"])
    return with_template(path)


class TestContract(InterfaceContract):
    """Each digit of the role's text is a word of the classifier's,
    so that every score is another."""

    name = "hf_reward"

    @pytest.fixture
    def args(self, digit_classifier):
        return {"path": digit_classifier, "batch_size": 3}

    @pytest.fixture
    def tokenizer(self):
        return SpacedDigits()


class SpacedDigits(DigitTokenizer):
    def decode(self, ids, skip_special_tokens=False):
        return " ".join(super().decode(ids, skip_special_tokens))


@pytest.fixture
def role():
    return Model("reward", None, word_tokenizer(ROLE_WORDS, eos_token="<eos>"), torch.device("cpu"))


TEXTS = [
    ("so a", "very good film <eos>"),
    ("so a", "bad <eos>"),
    ("a film", "dull"),
    ("so", "a very very dull film <eos>"),
]


@pytest.fixture
def data(role):
    prompts = [[ROLE_WORDS.index(word) for word in prompt.split()] for prompt, _ in TEXTS]
    rows = [
        p + [ROLE_WORDS.index(word) for word in r.split()]
        for p, (_, r) in zip(prompts, TEXTS, strict=True)
    ]
    lengths = [[len(rows[0]), len(rows[1])], [len(rows[2])], [len(rows[3])]]
    mask = torch.cat(
        [torch.arange(len(row)) < len(p) for row, p in zip(rows, prompts, strict=True)]
    )
    return SequenceSample.from_default(
        ids=[0, 1, 2],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor([t for row in rows for t in row]),
            "prompt_mask": mask,
        },
    )


def direct(path, texts):
    """Scores by transformers alone, one text at a time, nothing padded."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForSequenceClassification.from_pretrained(path),
    )
    model.eval()
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


FULL = [f"{p} {r.removesuffix(' <eos>')}" for p, r in TEXTS]
RESPONSES = [r.removesuffix(" <eos>") for _, r in TEXTS]


@pytest.mark.parametrize("make", [bert, roberta, llama])
def test_rewards_equal_the_scores_of_transformers(tmp_path, role, data, make):
    path = saved(tmp_path, make)
    out = HFRewardInterface(path=path, batch_size=3).inference(role, data, MicroBatchSpec())
    assert out.seqlens["rewards"] == [[1, 1], [1], [1]]
    assert out.data["rewards"].dtype == torch.float32
    torch.testing.assert_close(out.data["rewards"], direct(path, FULL)[:, -1], atol=1e-5, rtol=1e-5)


PADDING = [("[PAD]", 1), ("[PAD]", -1), ("[PAD]", None), ("[EOS]", 0), (None, 0), (None, None)]


@pytest.mark.parametrize(("of_tokenizer", "of_classifier"), PADDING)
def test_a_score_does_not_depend_on_the_other_texts(
    tmp_path, role, data, of_tokenizer, of_classifier
):
    """Whichever padding the classifier and its tokenizer name."""
    path = saved(tmp_path, lambda: llama(of_classifier), padding=of_tokenizer)
    out = HFRewardInterface(path=path, batch_size=4).inference(role, data, MicroBatchSpec())
    torch.testing.assert_close(out.data["rewards"], direct(path, FULL)[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [bert, gpt2, xlnet])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_score_does_not_depend_on_the_side_of_padding(tmp_path, role, data, make, side):
    """With padding before a text, absolute positions and the first token were others."""
    path = saved(tmp_path, make)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = side
    tokenizer.save_pretrained(path)
    out = HFRewardInterface(path=path, batch_size=4).inference(role, data, MicroBatchSpec())
    torch.testing.assert_close(out.data["rewards"], direct(path, FULL)[:, -1], atol=1e-5, rtol=1e-5)


def test_outputs_labels_and_response_only_are_supported(tmp_path, role, data):
    path = saved(tmp_path, bert)

    def rewards(**settings):
        return (
            HFRewardInterface(path=path, **settings)
            .inference(role, data, MicroBatchSpec())
            .data["rewards"]
        )

    full, response = direct(path, FULL), direct(path, RESPONSES)
    torch.testing.assert_close(rewards(label="negative", output="prob"), full.softmax(-1)[:, 0])
    torch.testing.assert_close(rewards(label=1, output="logprob"), full.log_softmax(-1)[:, 1])
    torch.testing.assert_close(rewards(label="positive", text="response"), response[:, 2])
    assert not torch.allclose(full[:, 2], response[:, 2])


CHAT_WORDS = [*WORDS, "system", "user", "assistant"]


def direct_chats(path, chats):
    """Scores by transformers alone, one conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    as_tensors = {"return_tensors": "pt", "return_dict": True}
    with torch.no_grad():
        written = (tokenizer.apply_chat_template(chat, **as_tensors) for chat in chats)
        return torch.cat([model(**tokens).logits for tokens in written])


def test_a_conversation_is_written_by_the_template_of_the_classifier(tmp_path, role, data):
    """The prompt's messages where the dataset has them; else the prompt is what a user says. The
    template writes all special tokens itself."""
    path = with_template(saved(tmp_path, lambda: bert(vocabulary=16), CHAT_WORDS))
    with_special_tokens(path)
    prompts = [
        [{"role": "system", "content": "good film"}, {"role": "user", "content": "so a"}],
        [{"role": "user", "content": "a film"}],
        None,
    ]
    data.metadata["messages"] = prompts
    interface = HFRewardInterface(path=path, text="chat", batch_size=3)
    rewards = interface.inference(role, data, MicroBatchSpec()).data["rewards"]
    of_responses = [prompts[0], prompts[0], prompts[1], [{"role": "user", "content": "so"}]]
    chats = [
        [*prompt, {"role": "assistant", "content": response}]
        for prompt, response in zip(of_responses, RESPONSES, strict=True)
    ]
    torch.testing.assert_close(rewards, direct_chats(path, chats)[:, -1])


def test_a_response_of_several_turns_is_no_message(tmp_path, role, data):
    path = with_template(saved(tmp_path, bert))
    data.data["prompt_mask"][3] = True  # the second of three tokens of the first response
    with pytest.raises(DataError, match="a response has 2 turns"):
        HFRewardInterface(path=path, text="chat").inference(role, data, MicroBatchSpec())


def test_a_chat_needs_a_template_and_a_template_that_is_not_used_is_reported(
    tmp_path, role, data, caplog
):
    path = saved(tmp_path, bert)
    with pytest.raises(ModelError, match="has no chat template, which text: chat needs"):
        HFRewardInterface(path=path, text="chat").inference(role, data, MicroBatchSpec())
    HFRewardInterface(path=path).inference(role, data, MicroBatchSpec())
    assert not caplog.records
    HFRewardInterface(path=with_template(path)).inference(role, data, MicroBatchSpec())
    assert "set text to chat if it was trained on chats" in caplog.text


def forging(text):
    """A role whose policy wrote this as text, and the batch of it."""
    tokenizer = word_tokenizer([*ROLE_WORDS, text], eos_token="<eos>")
    tokens = torch.tensor([ROLE_WORDS.index("bad"), len(ROLE_WORDS)])
    data = SequenceSample(
        ids=["a"], seqlens={"packed_input_ids": [[2]]}, data={"packed_input_ids": tokens}
    )
    return Model("reward", None, tokenizer, torch.device("cpu")), data


@pytest.mark.parametrize("make", [bert, llama])
def test_a_special_token_named_in_a_response_is_read_as_text(tmp_path, make):
    """A classifier would read [EOS] as the end of the text, and what follows as another."""
    path = saved(tmp_path, make)
    role, data = forging("[EOS]")
    rewards = HFRewardInterface(path=path).inference(role, data, MicroBatchSpec()).data["rewards"]
    assert not torch.allclose(rewards, direct(path, ["bad [EOS]"])[:, -1])
    # two unknown words
    torch.testing.assert_close(rewards, direct(path, ["bad [ EOS]"])[:, -1], atol=1e-5, rtol=1e-5)


def test_special_tokens_of_the_classifier_are_added_around_a_text(tmp_path, role, data):
    """Also where the text is cut."""
    path = with_special_tokens(saved(tmp_path, bert))
    uncut = HFRewardInterface(path=path).inference(role, data, MicroBatchSpec()).data["rewards"]
    torch.testing.assert_close(uncut, direct(path, FULL)[:, -1], atol=1e-5, rtol=1e-5)
    cut = (
        HFRewardInterface(path=path, max_length=5)
        .inference(role, data, MicroBatchSpec())
        .data["rewards"]
    )
    torch.testing.assert_close(cut, direct(path, LAST)[:, -1], atol=1e-5, rtol=1e-5)


LAST = [" ".join(text.split()[-3:]) for text in FULL]
FIRST = [" ".join(text.split()[:3]) for text in FULL]


@pytest.mark.parametrize(("overlong", "seen"), [("truncate_left", LAST), ("truncate_right", FIRST)])
def test_the_end_of_a_long_text_is_scored_by_default(tmp_path, role, data, overlong, seen):
    path = saved(tmp_path, bert)
    out = HFRewardInterface(path=path, max_length=3, overlong=overlong).inference(
        role, data, MicroBatchSpec()
    )
    torch.testing.assert_close(out.data["rewards"], direct(path, seen)[:, -1], atol=1e-5, rtol=1e-5)
    assert HFRewardInterface(path=path).overlong == "truncate_left"


def test_truncated_texts_are_counted_and_reported_once(tmp_path, role, data, caplog):
    path = saved(tmp_path, bert)
    reward = HFRewardInterface(path=path, max_length=4, batch_size=1)
    for _ in range(2):
        out = reward.inference(role, data, MicroBatchSpec())
    assert [len(text.split()) for text in FULL] == [5, 3, 3, 6]
    assert out.metadata["truncated"] == [0.5, 0.0, 1.0]
    (warning,) = caplog.records
    assert "sample 2 has 6 tokens" in warning.getMessage()
    assert "more than its limit of 4" in warning.getMessage()
    assert "the beginning of such texts is not scored" in warning.getMessage()


def test_texts_that_fit_are_not_counted(tmp_path, role, data, caplog):
    out = HFRewardInterface(path=saved(tmp_path, bert), max_length=6).inference(
        role, data, MicroBatchSpec()
    )
    assert out.metadata["truncated"] == [0.0, 0.0, 0.0]
    assert not caplog.records


def test_a_long_text_is_an_error_on_request(tmp_path, role, data):
    reward = HFRewardInterface(path=saved(tmp_path, bert), max_length=5, overlong="error")
    with pytest.raises(
        DataError, match=r"sample 2 has 6 tokens for .*, more than its limit of 5"
    ) as raised:
        reward.inference(role, data, MicroBatchSpec())
    assert raised.value.code == "F30"
    assert "max_length" in raised.value.hint
    with pytest.raises(ValueError, match="one of truncate_left, truncate_right, error"):
        HFRewardInterface(path="x", overlong="drop")


@pytest.mark.parametrize(
    ("make", "positions"), [(bert, 64), (roberta, 63), (lambda: roberta(padding=1), 62)]
)
def test_a_text_is_truncated_to_the_positions_of_the_classifier(tmp_path, role, make, positions):
    """The default of max_length is 512. RoBERTa's positions begin behind that of padding."""
    path = saved(tmp_path, make)
    tokens = torch.tensor([1, 2] * 40)
    long = SequenceSample(
        ids=["a"], seqlens={"packed_input_ids": [[80]]}, data={"packed_input_ids": tokens}
    )
    out = HFRewardInterface(path=path).inference(role, long, MicroBatchSpec())
    last = " ".join((["so", "film"] * 40)[-positions:])
    torch.testing.assert_close(
        out.data["rewards"], direct(path, [last])[:, -1], atol=1e-5, rtol=1e-5
    )
    assert out.metadata["truncated"] == [1.0]


def test_unusable_models_and_settings_are_refused(tmp_path, role, data):
    with pytest.raises(ModelError, match="nowhere is not a folder with a model"):
        HFRewardInterface(path=str(tmp_path / "nowhere")).inference(role, data, MicroBatchSpec())
    path = saved(tmp_path, bert)
    with pytest.raises(ModelError, match="no label 'happy'") as caught:
        HFRewardInterface(path=path, label="happy").inference(role, data, MicroBatchSpec())
    assert "positive" in caught.value.hint
    with pytest.raises(ModelError, match="none with number 3"):
        HFRewardInterface(path=path, label=3).inference(role, data, MicroBatchSpec())
    with pytest.raises(ValueError, match="one of logit, prob, logprob"):
        HFRewardInterface(path=path, output="score")


@pytest.mark.parametrize(
    ("cls", "problem", "hint"),
    [
        (
            LlamaForCausalLM,
            r"is not a classifier: its files have no score\.weight",
            "Classification",
        ),
        (LlamaForTokenClassification, "gives each token a number", "models.reward.head=value"),
    ],
)
def test_a_model_that_is_no_classifier_is_refused(tmp_path, role, data, cls, problem, hint):
    path = saved(tmp_path, lambda: cls(llama(padding=0).config))
    with pytest.raises(ModelError, match=problem) as refused:
        HFRewardInterface(path=path).inference(role, data, MicroBatchSpec())
    assert hint in refused.value.hint


def test_a_classifier_without_any_padding_is_refused(tmp_path, role, data):
    path = saved(tmp_path, llama)
    word_tokenizer(WORDS, unk_token="[UNK]").save_pretrained(path)
    config = Path(path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": None}))
    with pytest.raises(ModelError, match="has no padding token") as refused:
        HFRewardInterface(path=path).inference(role, data, MicroBatchSpec())
    assert "pad_token" in refused.value.hint


def test_a_classifier_that_would_run_its_own_code_is_refused(tmp_path, role, data):
    path = saved(tmp_path, bert)
    config = Path(path) / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"_attn_implementation": "someone/kernel"})
    )
    with pytest.raises(ModelError, match="_attn_implementation") as refused:
        HFRewardInterface(path=path).inference(role, data, MicroBatchSpec())
    assert refused.value.code == "S6"
