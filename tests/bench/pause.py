"""How long responses of a server pause for new weights, as a share of the time that these take to
arrive there.

    python tests/bench/pause.py [--copies 3] [--json]
    python tests/bench/pause.py --server sglang [--model FOLDER] [--arriving 2]

Without `--server` the server is a fake, and each parameter takes a while to arrive, as it does from
other machines: then the pause must be at most a tenth, else the exit code is 1. With `--server` it
is a real one on the CPU (`make test-servers` makes its environment). Source and server are then on
one machine, and a copy is the server's loading and little else; `--arriving` are the seconds in
which the weights would arrive from other machines. Responses are under way during all copies; one
that comes first is not counted, because a server compiles its first steps then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HOME = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HOME / "tests" / name) for name in ("servers", "fakes", "backends")]
from cpu_servers import OPTIONS, backend_arguments  # noqa: E402 - scripts of other folders
from fake_server import HashModel  # noqa: E402
from fake_sglang import FakeSGLang  # noqa: E402
from real_servers import HEAD_SIZE, AnyTokenizer, own_servers  # noqa: E402

from rlcli.api.config import GenerationHyperparameters, ModelInterfaceAbstraction  # noqa: E402
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, ParamReallocHook  # noqa: E402
from rlcli.api.model import Model  # noqa: E402
from rlcli.api.timing import recorded  # noqa: E402
from rlcli.api.weight_blocks import WeightBlock  # noqa: E402
from rlcli.runtime.pausing import PausingEngine  # noqa: E402
from rlcli.runtime.weight_flow import WeightCopies  # noqa: E402
from rlcli.testing.backend import BackendContract  # noqa: E402
from rlcli.testing.backend.generation import loaded  # noqa: E402
from rlcli.testing.backend.samples import prompts  # noqa: E402
from rlcli.testing.held_source import HeldSource  # noqa: E402
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model  # noqa: E402

LIMIT = 0.1
"""Largest share that the pause may have of a copy to the fake."""
ARRIVING_S, TOKEN_S = 2.0, 0.005
"""Seconds in which all weights arrive at the fake's client, and for a token of the fake."""
CPU = torch.device("cpu")
COPY = MFCDef(
    name="actor_train",
    model_name="actor",
    interface_type=ModelInterfaceType.TRAIN_STEP,
    interface_impl=ModelInterfaceAbstraction("null"),
    post_hooks=(ParamReallocHook(target="rollout"),),
)


@dataclass(frozen=True)
class Figures:
    """Of a copy, in seconds."""

    copy: float
    pause: float

    @property
    def share(self) -> float:
        return self.pause / self.copy


class SlowSource:
    """A trained engine whose parameters take some time to read."""

    def __init__(self, lm: torch.nn.Module, seconds: float):
        self._source = HeldSource(lm)
        self._names = [name for name, _ in lm.named_parameters()]
        self._seconds = seconds / len(self._names)

    def weight_blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
        return {
            WeightBlock.whole(name, self._source.shape(name)): lambda name=name: self._read(name)
            for name in self._names
        }

    def _read(self, name: str) -> torch.Tensor:
        time.sleep(self._seconds)
        return self._source.read(name).float()


@dataclass
class Pauses:
    """The pauses of an engine's streams, in seconds."""

    engine: Any
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        opened = self.engine.open
        self.engine.open = lambda *args: self._timed(opened(*args))

    def _timed(self, stream: Any) -> Any:
        pause, resume = stream.pause, stream.resume
        began: list[float] = []

        def pause_and_note() -> None:
            began.append(time.perf_counter())
            pause()

        def resume_and_note() -> None:
            resume()
            while began:  # a stream that is closed resumes too
                self.seconds.append(time.perf_counter() - began.pop())

        stream.pause, stream.resume = pause_and_note, resume_and_note
        return stream


@contextmanager
def responding(pausing: PausingEngine, tokens: int) -> Iterator[None]:
    """Responses are under way meanwhile, one batch after another."""
    is_over = threading.Event()
    settings = GenerationHyperparameters(max_new_tokens=tokens, responses_per_prompt=2)
    requested = prompts()

    def respond() -> None:
        while not is_over.is_set():
            with pausing.in_use() as model:
                seeds = range(requested.bs * settings.responses_per_prompt)
                model.module.generate(requested, TinyTokenizer(), settings, seeds)

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def copies(
    engine: Any, source: SlowSource, tokenizer: Any, count: int, tokens: int
) -> list[Figures]:
    """The figures of some copies to an engine with servers, after a first one."""
    pauses, figures = Pauses(engine), []
    actor = Model("actor", source, tokenizer, CPU)
    rollout = Model("rollout", engine, tokenizer, CPU)
    pausing = PausingEngine(rollout, max_segments=count + 3, most_prompts=8)
    topology: Any = SimpleNamespace(placement=lambda role: SimpleNamespace(ranks=(0,)))
    weights = WeightCopies([COPY], topology, 0, CPU)
    with responding(pausing, tokens):
        for _ in range(count + 1):
            while pausing._stream is None:
                time.sleep(0.01)
            with recorded() as timing:
                weights.take_part(COPY, {"actor": actor, "rollout": rollout}, {"rollout": pausing})
            actor.version.global_step += 1
            if len(pauses.seconds) == len(figures) + 1:
                figures.append(Figures(timing.seconds, pauses.seconds[-1]))
    return figures[1:]


def with_fake(count: int) -> list[Figures]:
    lm = tiny_model("llama", seed=1)
    with (
        FakeSGLang(HashModel(lm.config.vocab_size), token_s=TOKEN_S) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        checks = BackendContract()
        checks.name = "sglang"
        checks.args = {"urls": [server.url], "update": "disk", "weights_folder": folder}
        engine = checks.engine("llama")
        try:
            return copies(engine, SlowSource(lm, ARRIVING_S), TinyTokenizer(), count, tokens=100)
        finally:
            engine.close()


def with_server(backend: str, model: Path | None, arriving: float, count: int) -> list[Figures]:
    lm = loaded(model) if model else tiny_model("llama", head_dim=HEAD_SIZE)
    tokenizer, arguments = AnyTokenizer(lm), backend_arguments(backend)
    with (
        tempfile.TemporaryDirectory() as folder,
        own_servers(
            Path(folder), 1, backend, lm=lm, engine_tokenizer=tokenizer, **arguments
        ) as engine,
    ):
        return copies(engine, SlowSource(lm, arriving), tokenizer, count, tokens=100)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", choices=list(OPTIONS))
    parser.add_argument("--model", type=Path, help="of a real server; without one, a tiny one")
    parser.add_argument("--arriving", type=float, default=0.0, help="seconds, with --server")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.server:
        figures = with_server(options.server, options.model, options.arriving, options.copies)
    else:
        figures = with_fake(options.copies)
    if not figures:
        print("no copy met responses under way")
        return 1
    share = statistics.median(figure.share for figure in figures)
    if options.json:
        print(json.dumps([vars(figure) for figure in figures], indent=2))
    else:
        for figure in figures:
            print(f"copy {figure.copy:.3f} s, pause {figure.pause:.3f} s, {figure.share:.1%}")
    return int(share > LIMIT and not options.server)


if __name__ == "__main__":
    sys.exit(main())
