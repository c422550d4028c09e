"""Engines with real servers of their own, started as a run starts them."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlcli.launch.children import Members, run_environment
from rlcli.testing.backend import BackendContract
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import END, VOCABULARY, tiny_model
from rlcli.topology.groups import Group, process_folder


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
def own_servers(run_dir, count, backend, family="llama", **args):
    """An engine of a backend that starts `count` servers, with these further arguments."""
    group = Group("server", "server", (0,) * count)
    members = Members(run_dir, run_environment(1))
    members.start([group], node=0)
    checks = BackendContract()
    checks.name = backend
    checks.args = {"servers": count, "weights_folder": str(run_dir), **args}
    checks.server_folders = tuple(
        process_folder(run_dir, "server", group.name, index) for index in range(count)
    )
    engine = checks.engine(family)
    try:
        yield engine
    finally:
        engine.close()
        members.stop()


class AttachedContract(BackendContract):
    """Engines that are attached to one of two servers in turn: a check has two at most."""

    families = ("llama",)

    @pytest.fixture(autouse=True)
    def _attached(self, ours, tmp_path):
        self.turns = itertools.cycle(servers_of(ours))
        self.tmp_path = tmp_path
        yield
        self.restore(ours)
        ours._push()

    def restore(self, engine):
        """Undo what a check may have done to the servers of an engine."""

    def further_args(self):
        return {}

    def engine(self, family=None, **settings):
        server = next(self.turns)
        os.environ["RLCLI_TEST_KEY"] = server.endpoint.key
        self.args = {
            "urls": [server.endpoint.url],
            "api_key_env": "RLCLI_TEST_KEY",
            "weights_folder": str(self.tmp_path),
            **self.further_args(),
        }
        return super().engine(family, **settings)

    def test_sampling_follows_the_distribution(self):
        pytest.skip("4,000 requests")


def servers_of(engine):
    return engine._servers.servers


def server_process(server):
    """Its guardian's child; the guardian is its agent's."""
    folder = str(server.launch.slots[0].folder)
    (agent,) = (one for one in psutil.Process().children() if one.cmdline()[-1:] == [folder])
    return agent.children()[0].children()[0]


def follow(engine, seed):
    source = HeldSource(tiny_model("llama", seed=seed))
    blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
    engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)
