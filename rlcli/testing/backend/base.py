"""Shared by all backend checks: engines over tiny models, the layouts of ranks, and a plain loop
with the backend's settings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction
from rlcli.api.layout import RoleLayout
from rlcli.api.model import GenerationEngine, HoldsWeights, Model, ModelBackend
from rlcli.checkpoint.families import family_of
from rlcli.errors import UsageError
from rlcli.recipe.mesh import DIMENSIONS
from rlcli.registry import load_declared, make_backend, signature
from rlcli.testing.backend.differences import Weights
from rlcli.testing.backend.layouts import Layout
from rlcli.testing.backend.objectives import OBJECTIVES
from rlcli.testing.backend.plain import AdamW, PlainTraining, exact
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Contract, Violation, place_of, skip_unless
from rlcli.testing.held_source import HeldSource
from rlcli.testing.saved_models import saved_weights
from rlcli.testing.tiny_models import TinyTokenizer, tiny_config, tiny_model
from rlcli.topology.architecture import read_architecture

TOTAL_STEPS = 10
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "cohere")
"""Tried with a backend that runs any family: they differ in biases, norms, positions, tied weights,
windows, and in what scales and caps scores and logits."""
OF_RANKS = "biased_qwen3"
"""Likewise, for several ranks: with norms of heads and biases, of which tensor-parallel ranks hold
all or a part."""

SETTINGS: dict[str, Any] = {
    "lr": 1e-2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "max_grad_norm": 0.5,
    "warmup_steps": 2, "schedule": "linear", "min_lr_ratio": 0.1,
}  # fmt: skip
"""With these settings every part of an optimizer affects the weights: gradients are clipped, eps
matters."""
RATES = (1 / 3, 2 / 3, 1.0, 1 - 0.9 / 8)
"""Relative rates of the first of ten steps, with these settings."""

NOISE = 1e-5
"""Share of the largest gradient below which float32 does not determine the sign reliably."""


class BackendChecks(Contract):
    """Builds the backend's engines; the checks are in subclasses."""

    kind = "backend"
    tolerance: ClassVar[float] = 5e-5
    """Largest relative difference from the plain computation that counts as rounding; by default
    that of float32."""

    all_layouts: ClassVar[bool] = False
    """Whether ranks are tried in every layout that the backend runs, or only in the first."""

    server_folders: tuple[Path, ...] = ()
    """Folders of servers with running agents, for a backend that has them started."""

    device: ClassVar[str] = "cpu"
    """Where its engines run. A subclass for a backend that needs a GPU names that, and has it in
    `at_device`."""

    def at_device(self) -> AbstractContextManager[Any]:
        """Context of the process that runs engines."""
        return nullcontext()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _require_device(cls) -> None:
        checks = cls()
        devices = checks.cls.DEVICES
        if torch.device(checks.device).type not in devices:
            pytest.skip(f"it runs on {', '.join(devices)} only, and this contract on the CPU")

    @pytest.fixture(autouse=True)
    def _at_device(self) -> Iterator[None]:
        with self.at_device():
            yield

    @property
    def cls(self) -> type[ModelBackend]:
        return type(self.backend())

    @property
    def families(self) -> Sequence[str]:
        """Models of `rlcli.testing.tiny_models` that the backend runs, the one for most checks
        first."""
        return self.cls.FAMILIES or FAMILIES

    @property
    def family_of_ranks(self) -> str:
        """The model that ranks share."""
        return self.families[0] if self.cls.FAMILIES else OF_RANKS

    # -- subjects ----------------------------------------------------------------------------------

    def backend(self, **settings: Any) -> ModelBackend:
        """The backend with the contract's `args`, and those of `settings` that it has a setting
        for."""
        accepted = {argument.name for argument in signature("backends", self.name).arguments}
        args = dict(self.args) | {
            name: value for name, value in settings.items() if name in accepted
        }
        return make_backend(ModelBackendAbstraction(self.name, args))

    def engine(
        self,
        family: str | None = None,
        *,
        head: str = "lm",
        seed: int = 0,
        lm: nn.Module | None = None,
        mesh: Any = None,
        expert_ranks: int = 1,
        tokenizer: Any = None,
        **settings: Any,
    ) -> Any:
        """An engine over a tiny model, or over `lm`; skips the check if the backend cannot build
        one."""
        module: Any = (
            lm if lm is not None else tiny_model(family or self.families[0], head=head, seed=seed)
        )
        model = Model(
            "actor",
            None,
            tokenizer or TinyTokenizer(),
            torch.device(self.device),
            source=HeldSource(module),
            family=family_of(module.config.model_type),
            device_mesh=mesh,
            expert_ranks=expert_ranks,
            server_folders=self.server_folders,
        )
        spec = FinetuneSpec(total_train_steps=TOTAL_STEPS, dataset_size=100, train_batch_size=10)
        backend = self.backend(**({"dtype": "float32"} | settings))
        try:
            engine = backend.initialize(model, spec).module
        except UsageError as error:  # such as an argument that gives the address of its servers
            pytest.skip(f"not tried: {error.what}")
        if engine is None:
            pytest.skip("makes no engine")
        if not isinstance(engine, HoldsWeights):
            raise Violation(
                f"model.module is a {type(engine).__name__}",
                "set it to an engine that implements HoldsWeights, or to None",
                source_of(backend, "_initialize"),
            )
        return engine

    def scoring_engine(self, family: str | None = None, **settings: Any) -> Any:
        """An engine that scores sequences; skips the check if the backend has none."""
        skip_unless(self.cls.SCORES, "does not score")
        return self.engine(family, **settings)

    def trained_engine(self, family: str | None = None, **settings: Any) -> Any:
        """An engine with an optimizer; skips the check if the backend does not train."""
        skip_unless(self.cls.TRAINS, "does not train")
        return self.engine(family, **settings)

    def generating_engine(
        self, family: str | None = None, trained: bool = False, **settings: Any
    ) -> Any:
        """An engine that generates, with an optimizer if `trained`; skips the check if the backend
        has none."""
        engine = (self.trained_engine if trained else self.engine)(family, **settings)
        if not isinstance(engine, GenerationEngine):
            pytest.skip("does not generate")
        return engine

    def dimensions(self) -> tuple[str, ...]:
        """The mesh dimensions that the backend supports."""
        return self.cls.DIMENSIONS

    def tried(self, layouts: Sequence[Layout], family: str) -> list[Layout]:
        """The layouts that are tried, of those in which the backend runs a tiny model, each once,
        with those of their settings that it has."""
        backend, supported = self.backend(), list[Layout]()
        for degrees, settings in layouts:
            accepted = {name: value for name, value in settings.items() if hasattr(backend, name)}
            layout = degrees, accepted
            if layout not in supported and self._runs(layout, family):
                supported.append(layout)
        return supported if self.all_layouts else supported[:1]

    def require_settings(self, *names: str) -> None:
        """Skip the check of a backend that lacks one of these settings."""
        backend = self.backend()
        for name in names:
            skip_unless(hasattr(backend, name), f"has no setting {name}")

    def require_all_layouts(self) -> None:
        """Skip the check if only one layout is tried."""
        skip_unless(self.all_layouts, "not tried: --all-layouts does")

    def _runs(self, layout: Layout, family: str) -> bool:
        """Whether the backend has these dimensions, and declares (`LAYOUT`) no problem."""
        degrees, settings = layout
        if not degrees.keys() <= set(self.dimensions()):
            return False
        problems = load_declared("backends", self.name, "LAYOUT")
        if problems is None:
            return True
        mesh = dict.fromkeys(DIMENSIONS, 1) | dict(degrees)
        sizes = read_architecture(tiny_config(family).to_dict())
        arguments = {**self.args, **settings}
        return not any(problems(RoleLayout("actor", mesh, arguments, "auto", sizes)))

    def optimizer_settings(self, **settings: Any) -> AdamW:
        """AdamW as described by the backend's settings; override if they have other names."""
        backend = self.backend(**settings)
        skip_unless(
            hasattr(backend, "lr"), "not tried: has no setting lr; override optimizer_settings"
        )
        return AdamW.described_by(backend)

    def plain_training(self, family: str, head: str = "lm") -> PlainTraining:
        """A plain loop over the tiny model, with SETTINGS as far as the backend has them."""
        settings = self.optimizer_settings(**SETTINGS)
        return PlainTraining(tiny_model(family, head=head), settings)

    def rates(self) -> tuple[float, ...]:
        """Relative learning rates of the first steps, given the parts of SETTINGS that the backend
        supports."""
        return RATES if hasattr(self.backend(**SETTINGS), "schedule") else (1.0,) * len(RATES)

    def certain(self, family: str | None = None, head: str = "lm") -> Weights | None:
        """A bool mask per weight of the entries that have a gradient; None if all can be compared.

        AdamW without a noticeable eps turns rounding noise into full-size steps where the gradient
        should be zero, such as in key biases.
        """
        if getattr(self.backend(**SETTINGS), "eps", 0.0) > 1e-4:
            return None
        plain = exact(tiny_model(family or self.families[0], head=head))
        OBJECTIVES[head].plain(plain, batch())[0].backward()
        sizes = {name: p.grad.abs() for name, p in plain.named_parameters() if p.grad is not None}
        least = NOISE * max(float(size.max()) for size in sizes.values())
        return {name: size > least for name, size in sizes.items()}

    # -- looking -----------------------------------------------------------------------------------

    def weights(self, engine: HoldsWeights, look: Path | None = None) -> Weights:
        """A copy of all parameters, whole, under transformers' names. Every rank takes part.

        `look`: with several ranks, a not yet existing folder that all see:
        one of them may write an export.
        """
        if "pp" in self.dimensions():  # the state of a stage has only its own parameters
            return {name: tensor.cpu().clone() for name, tensor in engine.whole_parameters()}
        if offers(engine, "state"):
            parameters = engine.state().weights.items()
            return {name: _whole(tensor).cpu() for name, tensor in parameters}
        with tempfile.TemporaryDirectory() as scratch:
            return _exported_weights(engine, look or Path(scratch) / "model")


def _whole(tensor: Any) -> torch.Tensor:
    """A copy; for parts, of the whole tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def export(engine: HoldsWeights, folder: Path) -> None:
    """Write a folder for transformers; when this returns every rank can read it."""
    engine.save_to_hf(None, str(folder))
    meet()


def meet() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def _exported_weights(engine: HoldsWeights, folder: Path) -> Weights:
    """The contents of an export to `folder`, which is deleted afterwards."""
    export(engine, folder)
    weights = saved_weights(folder)
    if not weights:
        raise Violation(
            "save_to_hf wrote no safetensors into its folder",
            "write the folder on one rank at least",
            source_of(engine, "save_to_hf"),
        )
    meet()  # all have read
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(folder)
    meet()
    return weights


def offers(engine: HoldsWeights, method: str) -> bool:
    """Whether the engine has its own version of one of the optional methods."""
    return getattr(type(engine), method) is not getattr(HoldsWeights, method)


def source_of(engine: object, *methods: str) -> str:
    """`file:line` of the first of `methods` that the component defines itself,
    else of its class."""
    for method in methods:
        for owner in type(engine).__mro__:
            if method in vars(owner) and not owner.__module__.startswith("rlcli.api"):
                return place_of(vars(owner)[method])
    return place_of(type(engine))
