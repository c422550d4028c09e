"""Tokenizers from Hugging Face folders, without running code from a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.api.chat_template import check_template
from rlcli.api.model_folder import model_folder
from rlcli.api.tokenizer_limits import check_tokenizer
from rlcli.api.weight_files import MAX_JSON
from rlcli.errors import ModelError, first_line
from rlcli.files import known_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcli.checkpoint.light_tokenizer import LightTokenizer

Tokenizer = TypeVar("Tokenizer", "PreTrainedTokenizerBase", "LightTokenizer")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; pad falls back to the end-of-sequence token.
    Raises ModelError."""
    folder = model_folder(source, weights=False)
    check_tokenizer(folder, source)
    try:
        tokenizer = _loader_of(folder).from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"no tokenizer can be read from {source}: {first_line(error)}") from error
    for argument in ("is_local", "local_files_only"):  # it would save them as its own
        tokenizer.init_kwargs.pop(argument, None)
    check_template(tokenizer, source)
    return with_end_token(tokenizer, source)


def _loader_of(folder: Path) -> Any:
    """What loads the tokenizer of a folder. `AutoTokenizer` chooses a class by the model there:
    next to a qwen2 a Qwen tokenizer, with a token more, even for one that was saved as what its
    tokenizer.json says and nothing else."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    saved_as = known_object(folder / "tokenizer_config.json", MAX_JSON).get("tokenizer_class")
    is_whole = saved_as == "TokenizersBackend" and (folder / "tokenizer.json").is_file()
    return PreTrainedTokenizerFast if is_whole else AutoTokenizer


def with_end_token(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """The tokenizer, with a pad token if it had none. Raises ModelError if it has no
    end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {source} has no end-of-sequence token",
            hint="set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
