"""Engines with real servers of their own, started as a run starts them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import psutil
from cpu_servers import backend_arguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlcli.launch.children import Members, run_environment
from rlcli.testing.backend import BackendContract
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import END, VOCABULARY, tiny_model
from rlcli.topology.groups import Group, process_folder

HEAD_SIZE = 32
"""vLLM's CPU build has no attention for smaller heads."""
TOKENIZER = {"sglang": "tokenizer_path", "vllm": "tokenizer"}
"""Backend → the option of its server that names a tokenizer's folder."""


class AnyTokenizer:
    """A tokenizer of as many tokens as the model has."""

    eos_token_id = pad_token_id = 0

    def __init__(self, lm):
        self.size = int(lm.config.vocab_size)

    def __len__(self):
        return self.size


def save_tokenizer(folder):
    """The tokenizer of the tiny model's 97 tokens, which is also saved into a folder."""
    words = {f"w{id_}": id_ for id_ in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        eos_token=f"w{END}",
        pad_token="w0",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def own_servers(run_dir, count, backend, family="llama", lm=None, engine_tokenizer=None, **args):
    """An engine of a backend that starts `count` servers, with these further arguments. Without a
    tokenizer it gets that of a tiny model."""
    group = Group("server", "server", (0,) * count)
    members = Members(run_dir, run_environment(1))
    members.start([group], node=0)
    checks = BackendContract()
    checks.name = backend
    checks.args = {"servers": count, "weights_folder": str(run_dir), **args}
    checks.server_folders = tuple(
        process_folder(run_dir, "server", group.name, index) for index in range(count)
    )
    engine = checks.engine(family, lm=lm, tokenizer=engine_tokenizer)
    try:
        yield engine
    finally:
        engine.close()
        members.stop()


def small_servers(run_dir, count, backend, tokenizer, lm=None, family="llama", **options):
    """An engine with `count` servers on the CPU, with the tokenizer of a folder."""
    named = {TOKENIZER[backend]: str(tokenizer), "skip_tokenizer_init": False}
    arguments = backend_arguments(backend, **named, **options)
    return own_servers(run_dir, count, backend, family, lm, **arguments)


def servers_of(engine):
    return engine._servers.servers


def server_process(server):
    """Its guardian's child; the guardian is its agent's."""
    folder = str(server.launch.slots[0].folder)
    (agent,) = (one for one in psutil.Process().children() if one.cmdline()[-1:] == [folder])
    return agent.children()[0].children()[0]


def follow(engine, seed):
    """Give servers the weights of a tiny model, which is returned."""
    lm = tiny_model("llama", seed=seed)
    take(engine, lm)
    return lm


def take(engine, lm):
    """Give servers the weights of a model."""
    source = HeldSource(lm)
    blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
    engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)


def forget_speeds(engine):
    """On a busy machine one of two servers may have seemed slow, and would get no requests."""
    for server in engine._servers.servers:
        engine._servers._admission.started(server.number)
