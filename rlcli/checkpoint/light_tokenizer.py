"""A tokenizer read from its files with `tokenizers` alone: what datasets need of one, without
importing transformers.

It gives the same ids as `AutoTokenizer` (a test checks this). Where transformers does more than
read `tokenizer.json`, `NotLight` is raised, and `open_tokenizer` falls back to the real one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.chat_template import MAX_TEMPLATE, render_chat
from rlcli.api.tokenizer_limits import check_tokenizer
from rlcli.api.weight_files import MAX_JSON
from rlcli.files import read_regular

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

AS_THEY_ARE = frozenset(
    {"PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer"}
)
"""Classes, without `Fast`, that use a tokenizer.json exactly as it is."""

IF_BYTE_LEVEL = frozenset({"LlamaTokenizer"})
"""Classes that do so for a byte-level tokenizer and otherwise build their own."""


class NotLight(Exception):
    """Why transformers itself must read a tokenizer."""


@dataclass(frozen=True)
class Encoded:
    """The result of calling a tokenizer."""

    input_ids: Any
    """[tokens] of one text; [texts][tokens] of several."""
    offset_mapping: Any = None
    """For each token the [start, end) of its characters in the text, if requested."""


class LightTokenizer:
    """The part of a transformers tokenizer that reading data needs, with the same names."""

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        extra_special_tokens: Sequence[str] = (),
        name_or_path: str = "",
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self._extra = tuple(extra_special_tokens)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
    ) -> Encoded:
        texts = [text] if isinstance(text, str) else list(text)
        encode = (
            self.backend.encode_batch if return_offsets_mapping else self.backend.encode_batch_fast
        )
        encodings = encode(texts, add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in encodings]
        offsets = [encoding.offsets for encoding in encodings] if return_offsets_mapping else None
        if isinstance(text, str):
            return Encoded(ids[0], offsets and offsets[0])
        return Encoded(ids, offsets)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation; its tokens are `self(text, add_special_tokens=False)`."""
        if tokenize:
            raise ValueError(
                "render with tokenize=False, then call the tokenizer with add_special_tokens=False"
            )
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        settings = {**self.special_tokens_map, **variables}
        return render_chat(
            self.chat_template,
            conversation,
            add_generation_prompt=add_generation_prompt,
            **settings,
        )

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the named special tokens and of the others that are declared."""
        tokens = dict.fromkeys([*self.special_tokens_map.values(), *self._extra])
        return [id_ for token in tokens if (id_ := self.backend.token_to_id(token)) is not None]

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        self.special_tokens_map.pop("pad_token", None)
        if token is not None:
            self.special_tokens_map["pad_token"] = token


def read_light_tokenizer(folder: Path) -> LightTokenizer:
    """The tokenizer of a folder. Raises NotLight, or OSError,
    ValueError and what `tokenizers` raises."""
    from tokenizers import Tokenizer

    config = _json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file():
        raise NotLight("there is no tokenizer.json")
    check_tokenizer(folder, str(folder))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _refuse_others(folder, config, backend)
    declared = {
        int(id_): _added(token) for id_, token in (config.get("added_tokens_decoder") or {}).items()
    }
    added = declared or backend.get_added_tokens_decoder()
    settings = config if declared else config | _json(folder / "special_tokens_map.json")
    named, extra = _special_tokens(config, settings, added)
    _declare(backend, declared, named, extra)
    special = {name: _content(token) for name, token in named.items()}
    others = [_content(token) for token in extra]
    return LightTokenizer(backend, special, _chat_template(folder, config), others, str(folder))


def _refuse_others(folder: Path, config: Mapping[str, Any], backend: Tokenizer) -> None:
    model = _json(folder / "config.json")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    family = str(name or "").removesuffix("Fast")
    byte_level = "ByteLevel" in f"{backend.pre_tokenizer!r}{backend.decoder!r}"
    if family not in AS_THEY_ARE and not (family in IF_BYTE_LEVEL and byte_level):
        raise NotLight(f"its class is {name}" if name else "it does not say its class")
    if config.get("split_special_tokens"):
        raise NotLight("it splits special tokens")
    if config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        raise NotLight("it cleans up spaces")
    if (folder / "added_tokens.json").is_file() and "added_tokens_decoder" not in config:
        raise NotLight("it has an added_tokens.json")
    if "istral" in str(model.get("model_type")) and len(backend.get_vocab()) > 100_000:
        raise NotLight("transformers repairs tokenizers of its kind")


def _special_tokens(
    config: Mapping[str, Any], settings: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> tuple[dict[str, AddedToken | str], list[AddedToken | str]]:
    """(name → special token, further special tokens),
    from a tokenizer's files and its `added` tokens."""
    by_text = {token.content: token for token in added.values()}
    names = [
        *NAMED,
        *(
            key
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str)
        ),
    ]
    named = {
        name: token for name in names if (token := _token(settings.get(name), by_text)) is not None
    }
    extra: list[AddedToken | str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        further = settings.get(key) or []
        if isinstance(further, dict):
            named |= {
                name: token
                for name, value in further.items()
                if (token := _token(value, by_text)) is not None
            }
        else:
            extra += [token for value in further if (token := _token(value, by_text)) is not None]
    return named, extra


def _token(value: Any, by_text: Mapping[str, AddedToken]) -> AddedToken | str | None:
    if isinstance(value, dict):
        value = _added(value)
    return None if value is None else by_text.get(_content(value), value)


def _content(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else token.content


def _added(entry: Mapping[str, Any]) -> AddedToken:
    from tokenizers import AddedToken

    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {name: entry[name] for name in names if name in entry}
    return AddedToken(entry["content"], **flags)


def _declare(
    backend: Tokenizer,
    declared: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken | str],
    extra: Sequence[AddedToken | str],
) -> None:
    """Add tokens that only the other files declare to the backend, in transformers' order."""
    from tokenizers import AddedToken

    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [token for _, token in sorted(declared.items()) if repr(token) not in present]
    )
    special = [*named.values(), *extra]
    backend.add_special_tokens(
        [AddedToken(t, normalized=False) if isinstance(t, str) else t for t in special]
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "additional_chat_templates").is_dir():
        raise NotLight("it has several chat templates")
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_regular(file, MAX_TEMPLATE).decode("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template}
        if templates.keys() != {"default"}:
            raise NotLight("it has several chat templates")
        return str(templates["default"])
    return template


def _json(file: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file."""
    if not file.is_file():
        return {}
    value = json.loads(read_regular(file, MAX_JSON))
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value
