"""Models and tokenizers from Hugging Face folders, or from nothing. Only safetensors, and no code from a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.api.chat_template import check_template
from rlcli.api.model_folder import first_line, model_folder
from rlcli.api.value_model import value_model_class, value_parameters
from rlcli.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from rlcli.checkpoint.light_tokenizer import LightTokenizer

Tokenizer = TypeVar("Tokenizer", "PreTrainedTokenizerBase", "LightTokenizer")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; pad falls back to the end-of-sequence token. Raises ModelError."""
    from transformers import AutoTokenizer

    folder = str(model_folder(source, weights=False))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"no tokenizer can be read from {source}: {first_line(error)}") from error
    check_template(tokenizer, source)
    return with_end_token(tokenizer, source)


def with_end_token(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """The tokenizer, with a pad token if it had none. Raises ModelError if it has no end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {source} has no end-of-sequence token", hint="set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    source: str | Mapping[str, Any], *, head: str, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> nn.Module:
    """A transformers model in float32, in evaluation mode, without dropout.

    `source` is a folder, a Hub id, or a transformers configuration with its `model_type` (random weights, drawn
    from `seed`). With `head="value"` the model predicts one number per token; a head that the source does not
    have starts at zero. Raises ModelError.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # its reports and progress bars are not for our users
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = _random(source, head, tokenizer) if isinstance(source, Mapping) else _pretrained(source, head)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer)
    return model.eval()


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every id that the tokenizer can give needs a row in the embedding. Raises ModelError F32."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            hint="use the tokenizer that the model was made with",
            code="F32",
        )


def _pretrained(source: str, head: str) -> nn.Module:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = str(model_folder(source, weights=True))
    options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        config = _without_dropout(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
        options |= {"config": config, "output_loading_info": True, "local_files_only": True}
        if head == "value":
            config.num_labels = 1
        family: Any = AutoModelForCausalLM if head == "lm" else value_model_class(config)
        model, report = family.from_pretrained(folder, **options)
    except Exception as error:  # transformers, safetensors and torch each have their own
        raise ModelError(f"the model in {source} cannot be loaded: {first_line(error)}") from error
    missing = set(report["missing_keys"])
    if head == "value":
        new = value_parameters(model) & missing
        _zero(model.get_parameter(name) for name in new)
        missing -= new
    if missing:
        raise ModelError(
            f"the weights in {source} lack {len(missing)} tensors that the model needs, first {min(missing)}",
            hint="the folder may be incomplete, or its config.json of another model",
        )
    return model


def _random(config: Mapping[str, Any], head: str, tokenizer: PreTrainedTokenizerBase | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ModelError("a model from scratch needs its model_type", hint="for example model_type: llama")
    if tokenizer is not None:
        fields = {
            "vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **fields,
        }  # fmt: skip
    try:
        made = _without_dropout(AutoConfig.for_model(model_type, **fields))
        if head == "lm":
            return AutoModelForCausalLM.from_config(made)
        lm: Any = AutoModelForCausalLM.from_config(made)
        made.num_labels = 1
        model: Any = value_model_class(made)(made)
    except Exception as error:  # whatever a configuration class makes of odd values
        raise ModelError(f"no {model_type} model can be made from these settings: {first_line(error)}") from error
    model.base_model.load_state_dict(lm.base_model.state_dict())  # a critic starts from the actor's backbone
    _zero(model.get_parameter(name) for name in value_parameters(model))
    return model


def _zero(parameters: Iterable[torch.Tensor]) -> None:
    """A new value head predicts 0 everywhere, so it neither helps nor harms before it has learnt."""
    for parameter in parameters:
        parameter.data.zero_()


def _without_dropout(config: Any) -> Any:
    """Policy ratios compare log-probs of two passes; dropout would make them differ for no reason."""
    for name in list(config.to_dict()):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name, None), int | float):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    return config
