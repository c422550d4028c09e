"""A backend's declarations, and the engines it builds, before anything runs."""

from __future__ import annotations

import torch

from rlcli.api.model import (
    ForwardEngine,
    GenerationEngine,
    HoldsWeights,
    Model,
    ModelBackend,
    TrainEngine,
)
from rlcli.errors import RlcliError
from rlcli.recipe.mesh import DIMENSIONS
from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import require_same_weights
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.tiny_models import tiny_model

ABILITIES = {"TRAINS": TrainEngine, "SCORES": ForwardEngine, "GENERATES": GenerationEngine}
"""Declared ability → the contract that its engines must then meet."""


class DeclarationChecks(DeclaredSubject, BackendChecks):
    """The class, its settings, and the engine that it builds."""

    base = ModelBackend

    def test_dimensions_are_known(self) -> None:
        """DIMENSIONS names dimensions of a mesh, including dp"""
        cls, declared = self.cls, self.dimensions()
        if "dp" not in declared or not set(declared) <= set(DIMENSIONS):
            raise Violation(
                f"DIMENSIONS is {declared}", f"choose from {', '.join(DIMENSIONS)}", place_of(cls)
            )

    def test_engines_are_what_the_class_says(self) -> None:
        """TRAINS, SCORES and GENERATES say what its engines can do"""
        cls, engine = self.cls, self.engine()
        for name, contract in ABILITIES.items():
            if getattr(cls, name) and not isinstance(engine, contract):
                raise Violation(
                    f"{name} is True, but its engine is not a {contract.__name__}",
                    f"set {name}: ClassVar[bool] = False",
                    place_of(cls),
                )

    def test_the_model_is_taken_as_it_is(self) -> None:
        """an engine has the model's weights, device and one rank"""
        for family in self.families:
            engine = self.engine(family)
            where = source_of(engine, "__init__")
            if engine.device != torch.device(self.device) or engine.dp_size != 1:
                raise Violation(
                    f"device {engine.device}, dp_size {engine.dp_size} for a model on "
                    f"one rank's {self.device}",
                    "take device and mesh from the model",
                    where,
                )
            weights = {name: p.detach() for name, p in tiny_model(family).named_parameters()}
            occasion = f"from those of the given {family}"
            cause = "keep the weights of the given model"
            require_same_weights(self.weights(engine), weights, occasion, cause, where)

    def test_a_role_without_weights_is_left_or_refused(self) -> None:
        """a role without weights gets no engine, or an error of rlcli"""
        model = Model("reward", None, None, torch.device("cpu"))
        backend = self.backend()
        try:
            module = backend.initialize(model, None).module
        except RlcliError:
            return
        except Exception as error:
            finding = f"{type(error).__name__} for a role without weights: {error}"
            raise Violation(
                finding,
                "raise ModelError with a hint: use backend: null for such a role",
                source_of(backend, "_initialize"),
            ) from error
        if module is not None and not isinstance(module, HoldsWeights):
            finding = f"model.module is a {type(module).__name__} for a role without weights"
            raise Violation(
                finding, "set it to an engine, or to None", source_of(backend, "_initialize")
            )
