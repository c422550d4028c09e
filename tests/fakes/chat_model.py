"""A chat model's folder, small enough for tests, with a tokenizer for any text."""

from __future__ import annotations

from pathlib import Path

import torch

from rlcli.testing.tokenizer import as_transformers, byte_tokenizer


def write_chat_model(
    folder: Path, *, chat: bool = True, uniform: bool = False, positions: int = 512
) -> Path:
    """A llama with random weights over the tokens of `byte_tokenizer`. `uniform`: each token is
    equally likely, including control characters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = as_transformers(byte_tokenizer(chat=chat))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if uniform:
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
