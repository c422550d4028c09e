"""Chat templates of public models, as TRL's wheel has them, and tokenizers for any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlcli.api.chat_template import DAY, conversation_text, shared_length
from rlcli.api.special_tokens import unmarked
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.inspect.rows import open_tokenizer

CORPUS = ("Add 12 and 34 with the tool.", "The sum is 46: is that so?", "<think> hm </think>")
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s{}]+[|｜]>|<(?:start|end)_of_\w+>|<\|?turn\|?>|\[/?[A-Z_]+\]"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == messages | map(attribute='role') | list | length - 1 %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments, "
    "'id': c.id} | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id}"
    " | tojson }}[/TOOL_RESULTS]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""In the style of Mistral's: tools stand before the last message if that is the user's."""


@cache
def public_templates() -> Mapping[str, str]:
    """Name → template, of all in TRL's wheel."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.jinja"))}


FOR_PARTS = {"idefics3", "idefics3_training", "llava_next", "llava_next_training"}
"""Templates that take the contents of messages as lists of parts only."""


def text_templates() -> Mapping[str, str]:
    """Those that take the contents of messages as texts."""
    return {name: text for name, text in public_templates().items() if name not in FOR_PARTS}


def byte_level(template: str) -> LightTokenizer:
    """A byte-level BPE with the special tokens of a template."""
    return _with_special(Tokenizer.from_str(_trained_byte_level()), template)


def sentencepiece_like(template: str) -> LightTokenizer:
    """A BPE that writes a blank before a text and bytes for what it does not know."""
    return _with_special(Tokenizer.from_str(_trained_sentencepiece()), template)


def arithmetic(template: str) -> LightTokenizer:
    """`builtin:arithmetic` with the special tokens of a template."""
    builtin: Any = open_tokenizer("builtin:arithmetic").tokenizer
    return _with_special(Tokenizer.from_str(builtin.backend.to_str()), template)


TOKENIZERS = {
    "byte level": byte_level,
    "sentencepiece-like": sentencepiece_like,
    "arithmetic": arithmetic,
}


def written_turn(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    turn: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
) -> str:
    """What a template writes for a turn of the assistant, from where the model begins."""
    prompt, text = (
        unmarked(conversation_text(tokenizer, rendered, tools=tools, day=DAY, **how))
        for rendered, how in (
            (messages, {"add_generation_prompt": True}),
            ([*messages, turn], {}),
        )
    )
    return text[shared_length(prompt, text) :]


def sampled(tokenizer: LightTokenizer, text: str) -> list[int]:
    """The tokens of a text in the middle of others."""
    ids: list[int] = tokenizer(NAMED["bos_token"] + text, add_special_tokens=False).input_ids
    return ids[1:]


def closing(tokenizer: LightTokenizer) -> str:
    """What a template writes behind the last turn of a conversation."""
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}
    return written_turn(tokenizer, [question], answer).rpartition("answer")[2]


def end_of_turn(tokenizer: LightTokenizer) -> list[int]:
    """The special token with which a model ends a turn; none if its template writes none."""
    ids = tokenizer(closing(tokenizer), add_special_tokens=False).input_ids
    return ids[:1] if ids and ids[0] in tokenizer.added_tokens_decoder else []


def _with_special(backend: Tokenizer, template: str) -> LightTokenizer:
    names = [*NAMED.values(), *sorted(set(_SPECIAL.findall(template)))]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return LightTokenizer(backend, NAMED, template)


@cache
def _trained_byte_level() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend.to_str()


@cache
def _trained_sentencepiece() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    trained = json.loads(backend.to_str())["model"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: id_ for id_, name in enumerate(["<unk>", *names, *trained["vocab"]])}
    merges = [tuple(pair) for pair in trained["merges"]]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    complete = Tokenizer(model)
    complete.pre_tokenizer = backend.pre_tokenizer
    complete.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return complete.to_str()
