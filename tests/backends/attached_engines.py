"""Engines whose servers are fakes in this process, with a real model in each."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from fake_server import FakeServer
from fake_server_model import TransformersModel
from server_kinds import SGLANG

from rlcli.testing.backend import BackendContract
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import tiny_model


class Attached(BackendContract):
    """Engines whose servers are fakes in this process."""

    server_kind, name = SGLANG, SGLANG.name
    servers = 1
    update = "process_group"
    draws = 2  # the sampler is the fake's

    @pytest.fixture(autouse=True)
    def _fakes(self, tmp_path):
        self.tmp_path = tmp_path
        with ExitStack() as self.stack:
            self.fakes: list[FakeServer] = []
            yield

    def engine(self, family=None, **settings):
        lm = settings.get("lm") or tiny_model(family or self.families[0])
        fakes = [
            self.stack.enter_context(self.server_kind.fake(TransformersModel(lm.config)))
            for _ in range(self.servers)
        ]
        self.fakes += fakes
        self.args = {
            "urls": [fake.url for fake in fakes],
            "update": self.update,
            "weights_folder": str(self.tmp_path),
            "start_deadline_s": 20.0,
            "request_deadline_s": 20.0,
            "update_deadline_s": 20.0,
        }
        built = super().engine(family, **settings)
        self.stack.callback(built.close)
        return built


def follow(engine, seed):
    """Let the engine follow a model of another seed."""
    source = HeldSource(tiny_model("llama", seed=seed))
    blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
    engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)
