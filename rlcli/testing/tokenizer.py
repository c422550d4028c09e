"""A tokenizer for tests: every byte of a text is a token,
so that any text can be encoded and decoded."""

from __future__ import annotations

from typing import Any

from rlcli.checkpoint.light_tokenizer import LightTokenizer

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
ROLES = ("<system>", "<user>", "<assistant>")

MESSAGE = (
    "<{{ message['role'] }}>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    f"{{% for message in messages %}}{MESSAGE}{{% endfor %}}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It writes the begin token itself, as most do: adding special tokens again gives two."""

MARKED = (
    "{% if message['role'] == 'assistant' %}{% generation %}"
    f"{MESSAGE}{{% endgeneration %}}{{% else %}}{MESSAGE}{{% endif %}}"
)
MARKED_TEMPLATE = CHAT_TEMPLATE.replace(MESSAGE, MARKED)
"""Its markers enclose the name of the role too, so that they mark more than the answer."""


def byte_tokenizer(
    *, chat: bool = False, template: str = CHAT_TEMPLATE, around: str = "<bos> $A"
) -> LightTokenizer:
    """One token per byte and special token. `chat`: with a chat template. `around`: what encloses a
    text, in `TemplateProcessing` notation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = [*SPECIAL_TOKENS.values(), *ROLES]
    vocabulary = {
        token: id_
        for id_, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    named = [(token, vocabulary[token]) for token in special if token in around]
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=named)
    return LightTokenizer(backend, SPECIAL_TOKENS, template if chat else None, ROLES)


def as_transformers(tokenizer: LightTokenizer) -> Any:
    """The same as a transformers tokenizer, for datasets that need more than a light one."""
    from transformers import PreTrainedTokenizerFast

    full = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
    full.chat_template = tokenizer.chat_template
    return full
