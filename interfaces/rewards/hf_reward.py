"""Reward from a Hugging Face sequence classifier, such as a sentiment model,
with its own tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from rlcli.api.chat_template import DAY, conversation
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.mocks import uniform
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface
from rlcli.api.model_folder import model_folder
from rlcli.api.special_tokens import as_content, tokens_of
from rlcli.api.tokenizer_limits import check_tokenizer
from rlcli.api.value_model import CRITIC
from rlcli.errors import DataError, ModelError

from ._scores import one_each, ones, shares
from ._text import conversations, full_texts, response_texts

log = logging.getLogger(__name__)

Output = Literal["logit", "prob", "logprob"]
Text = Literal["full", "response", "chat"]
Overlong = Literal["truncate_left", "truncate_right", "error"]

_LOADING = threading.Lock()
"""transformers patches its own classes while loading: two threads at once may leave them patched
for good."""


@dataclass(kw_only=True)
class HFRewardInterface(ModelInterface):
    """Scores each sequence's text by one output of a classifier. Its role holds no weights: set its
    backend to `null` and give it the actor's tokenizer, which turns tokens back into text.
    """

    ELSEWHERE: ClassVar[str] = "classifier sequence_classification"
    METRICS: ClassVar[Metrics] = {
        "truncated": ("share", "share of texts that were truncated, mean over the prompts")
    }
    READS: ClassVar[Declaration] = {
        "inference": (
            "packed_input_ids",
            "prompt_mask if text=response",
            "prompt_mask if text=chat",
        )
    }
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    TRIED: ClassVar[bool] = False
    LIMITS: ClassVar[Limits] = {"batch_size": {"ge": 1}, "max_length": {"ge": 1}}

    path: str
    """Folder or Hub id of the classifier and its tokenizer; weights as safetensors,
    no custom code."""

    label: int | str = -1
    """Which output: its number (-1 is the last) or its name in the classifier's config."""

    output: Output = "logit"
    """The raw output, its softmax probability (sigmoid if there is only one output),
    or the log of that."""

    text: Text = "full"
    """full: score prompt and response together, as one text. response: the response alone. chat:
    the conversation as the classifier's own chat template writes it, for reward models that were
    trained on chats; its roles are those of the messages in the dataset."""

    batch_size: int = 32
    """Texts per forward pass of the classifier."""

    max_length: int = 512
    """Maximum length of a text in the classifier's tokens;
    less if the classifier itself takes fewer."""

    overlong: Overlong = "truncate_left"
    """How to treat longer texts: drop their beginning (a response ends with its answer), or their
    end, and count them as `truncated`; or end the run."""

    classifier: Any = field(init=False, default=None, repr=False)
    tokenizer: Any = field(init=False, default=None, repr=False)
    before: list[int] = field(init=False, default_factory=list, repr=False)
    after: list[int] = field(init=False, default_factory=list, repr=False)
    """The special tokens of the classifier around a text."""
    padding: int = field(init=False, default=0, repr=False)
    limit: int = field(init=False, default=0, repr=False)
    has_warned: bool = field(init=False, default=False, repr=False)

    @torch.no_grad()
    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` (and `prompt_mask`) → `rewards`; metadata `truncated`, the share of
        each sample's texts that were truncated."""
        if self.classifier is None:
            self._load(model.device)
        tokens = tokens_of(self.tokenizer, self._texts(model, data))
        truncated = self._truncated([len(ids) for ids in tokens], data)
        # minimises padding per batch
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        rewards = torch.zeros(len(tokens))
        for begin in range(0, len(order), self.batch_size):
            indices = order[begin : begin + self.batch_size]
            rewards[indices] = self._score([tokens[index] for index in indices])
        return _rewarded(data, rewards, truncated)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Random rewards, like those of an uncertain classifier."""
        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        prob = uniform(model, data, ones(data), "rewards").clamp(0.01, 0.99)
        rewards = {"logit": prob.logit(), "prob": prob, "logprob": prob.log()}[self.output]
        return _rewarded(data, rewards, [False] * len(rewards))

    def _texts(self, model: Model, data: SequenceSample) -> list[str]:
        """The text of each sequence, meant for `tokens_of`."""
        if self.text == "chat":
            chats = conversations(model.data_tokenizer, data)
            return [conversation(self.tokenizer, chat, day=DAY).text for chat in chats]
        read = full_texts if self.text == "full" else response_texts
        return [as_content(self.tokenizer, text) for text in read(model.data_tokenizer, data)]

    def _load(self, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = model_folder(self.path, weights=True)
        check_tokenizer(folder, self.path)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            with _LOADING:
                classifier, loaded = AutoModelForSequenceClassification.from_pretrained(
                    folder,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                )
        except (OSError, ValueError, ImportError) as problem:
            raise ModelError(
                f"cannot load the reward classifier {self.path}: {problem}"
            ) from problem
        _demand_classifier(self.path, classifier.config, loaded["missing_keys"])
        # a classifier finds the end of a text as the last token that is not its config's padding
        padding = _padding_token(classifier, self.tokenizer)
        if padding is None:
            raise ModelError(
                f"{self.path} has no padding token, nor one that ends a text",
                hint="set pad_token in its tokenizer_config.json",
            )
        self.padding = classifier.config.get_text_config().pad_token_id = padding
        names = classifier.config.label2id
        if isinstance(self.label, str) and self.label not in names:
            raise ModelError(
                f"{self.path} has no label {self.label!r}", hint=f"it has {', '.join(names)}"
            )
        if (
            isinstance(self.label, int)
            and not -classifier.num_labels <= self.label < classifier.num_labels
        ):
            raise ModelError(
                f"{self.path} has {classifier.num_labels} outputs, none with number {self.label}"
            )
        self._check_template()
        if self.text != "chat":  # a template writes special tokens itself
            self.before, self.after = _surroundings(self.tokenizer)
        self.limit = self._most_tokens(classifier)
        self.classifier = classifier.to(device).eval()

    def _check_template(self) -> None:
        """Raises ModelError if there is none for `text: chat`;
        warns if there is one for another text."""
        has_template = self.tokenizer.chat_template is not None
        if self.text == "chat" and not has_template:
            raise ModelError(
                f"{self.path} has no chat template, which text: chat needs",
                hint="set text to full, or to response",
            )
        if self.text != "chat" and has_template:
            log.warning(
                "%s has a chat template, without which it may score badly; set text to chat if it "
                "was trained on chats",
                self.path,
            )

    def _most_tokens(self, classifier: Any) -> int:
        """The smallest of `max_length`, the classifier's positions and its tokenizer's limit."""
        positions = _positions(classifier) or self.max_length
        limit = min(self.max_length, positions, self.tokenizer.model_max_length)
        special = len(self.before) + len(self.after)
        if limit <= special:
            raise ModelError(
                (
                    f"{self.path} cannot score any text: it takes at most {limit} tokens, of "
                    f"which {special} are special tokens"
                ),
                hint="raise max_length",
            )
        return int(limit)

    def _truncated(self, lengths: list[int], data: SequenceSample) -> list[bool]:
        """Whether each text, given its length in tokens, exceeds the classifier's limit. The first
        one is warned about, or is an error."""
        counts = [len(self.before) + length + len(self.after) for length in lengths]
        longest = max(range(len(counts)), key=counts.__getitem__, default=None)
        if longest is None or counts[longest] <= self.limit:
            return [False] * len(counts)
        owners = [
            id_
            for id_, lengths in zip(data.ids, data.seqlens["packed_input_ids"], strict=True)
            for _ in lengths
        ]
        message = (
            f"the text of sample {owners[longest]} has {counts[longest]} tokens for "
            f"{self.path}, more than its limit of {self.limit}"
        )
        hint = "raise max_length if the classifier takes more, or lower generation.max_new_tokens"
        if self.overlong == "error":
            raise DataError(message, hint=f"{hint}; or set overlong to truncate_left", code="F30")
        if not self.has_warned:
            lost = "beginning" if self.overlong == "truncate_left" else "end"
            log.warning(
                "%s: the %s of such texts is not scored (they are counted as truncated). %s",
                message,
                lost,
                hint,
            )
            self.has_warned = True
        return [count > self.limit for count in counts]

    def _score(self, contents: list[list[int]]) -> torch.Tensor:
        """[N]: the scores of texts, from their tokens without special ones."""
        sequences = [
            torch.tensor([*self.before, *self._within_limit(ids), *self.after], dtype=torch.int64)
            for ids in contents
        ]
        masks = [torch.ones_like(sequence) for sequence in sequences]
        side, device = _padding_side(self.classifier), self.classifier.device
        input_ids = pad_sequence(
            sequences,
            batch_first=True,
            padding_value=self.padding,
            padding_side=side,
        ).to(device)
        attention_mask = pad_sequence(masks, batch_first=True, padding_side=side).to(device)
        logits = self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits.float()
        column = (
            self.classifier.config.label2id[self.label]
            if isinstance(self.label, str)
            else self.label
        )
        if self.output != "logit":
            single = logits.shape[-1] == 1
            logits = torch.nn.functional.logsigmoid(logits) if single else logits.log_softmax(-1)
        scores = logits[:, column]
        return (scores.exp() if self.output == "prob" else scores).cpu()

    def _within_limit(self, ids: list[int]) -> list[int]:
        room = self.limit - len(self.before) - len(self.after)
        return ids[-room:] if self.overlong == "truncate_left" else ids[:room]


def _demand_classifier(name: str, config: Any, missing: Collection[str]) -> None:
    """Refuse a model of another class, of which transformers would take what fits. `missing`: what
    its files lack, and transformers has drawn at random. Raises ModelError."""
    if missing:
        raise ModelError(
            f"{name} is not a classifier: its files have no {', '.join(sorted(missing)[:3])}",
            hint="path names a model whose class in config.json is a …ForSequenceClassification",
        )
    if any(architecture.endswith(CRITIC) for architecture in config.architectures or ()):
        raise ModelError(
            f"{name} is a {config.architectures[0]}, which gives each token a number",
            hint="a reward model that rlcli has trained is a role: set models.reward.path to it, "
            "models.reward.head=value, models.reward.backend=inference, and the interface "
            "reward_model",
        )


def _padding_token(classifier: Any, tokenizer: Any) -> int | None:
    """The classifier's own, with which a text in a batch is scored as it is alone; without one,
    its tokenizer's."""
    padding = classifier.config.get_text_config().pad_token_id
    if padding is None or padding < 0:  # some configs say -1 for none
        padding = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None else padding


def _padding_side(classifier: Any) -> str:
    """Behind the texts, wherever the tokenizer puts it: positions and the token that BERT's like
    read are counted from the start. XLNet's like read the last one."""
    reads_last = getattr(classifier.config, "summary_type", None) == "last"
    return "left" if reads_last else "right"


def _positions(classifier: Any) -> int | None:
    """How many tokens its positions suffice for, if it has a limit. Those of RoBERTa and its like
    begin behind the index that stands for padding."""
    positions = getattr(classifier.config, "max_position_embeddings", None)
    if positions is None or positions < 0:  # XLNet's has -1 for none
        return None
    skipped = [
        module.padding_idx + 1
        for name, module in classifier.named_modules()
        if name.endswith(".position_embeddings")
        and getattr(module, "padding_idx", None) is not None
    ]
    return int(positions) - max(skipped, default=0)


def _surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, and after it."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    begin = next((number for number, special in enumerate(is_special) if not special), len(ids))
    end = next(
        (number for number in range(len(ids), begin, -1) if not is_special[number - 1]), begin
    )
    return ids[:begin], ids[end:]


def _rewarded(data: SequenceSample, rewards: torch.Tensor, truncated: list[bool]) -> SequenceSample:
    """One reward per text, and for each sample the share of its texts that were truncated."""
    return one_each(data, {"rewards": rewards}, {"truncated": shares(data, truncated)})


register_interface("hf_reward", HFRewardInterface)
