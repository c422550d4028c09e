"""What is wrong with the arguments of components is found without importing most of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlcli import registry
from rlcli.api.config import ModelBackendAbstraction, ModelInterfaceAbstraction
from rlcli.errors import RlcliError
from rlcli.inspect.constructors import MAKING

MAKE = {
    "interfaces": lambda name, args: registry.make_interface(ModelInterfaceAbstraction(name, args)),
    "backends": lambda name, args: registry.make_backend(ModelBackendAbstraction(name, args)),
}
CONTRADICTIONS = [
    ("interfaces", "gae", {"overlong_buffer": 4, "overlong_limit": 2}),
    ("interfaces", "group_relative", {"train_on_best": 1}),
    ("interfaces", "group_relative", {"overlong_buffer": 4, "overlong_limit": 2}),
    ("backends", "deepspeed", {"zero_stage": 0, "offload_optimizer": True}),
    ("backends", "deepspeed", {"zero_stage": 2, "offload_parameters": True}),
    ("backends", "megatron", {"sequence_parallel": True}),
    ("backends", "sglang", {"python": "/p", "tp": 3, "nodes": 2, "weights_folder": "/"}),
    ("backends", "sglang", {"urls": ["ftp://host"]}),
]
COMPARED = [
    (kind, name)
    for kind in MAKE
    for name in registry.names(kind)
    if "ARGUMENT_CHECK" in registry.signature(kind, name).constants
]


@pytest.mark.parametrize(("kind", "name", "args"), CONTRADICTIONS)
def test_the_declared_check_refuses_what_the_constructor_refuses(kind, name, args, monkeypatch):
    monkeypatch.setattr("rlcli.registry.loading.missing_libraries", lambda signature: [])
    arguments = registry.signature(kind, name).arguments
    values = {argument.name: argument.default for argument in arguments} | args
    with pytest.raises(ValueError, match=r"\w") as compared:
        registry.load_declared(kind, name, "ARGUMENT_CHECK")(SimpleNamespace(**values))
    with pytest.raises(RlcliError) as refused:
        MAKE[kind](name, args)
    assert str(compared.value) in refused.value.what


@pytest.mark.parametrize(("kind", "name"), COMPARED)
def test_a_class_that_declares_its_check_inherits_no_later_constructor(kind, name, monkeypatch):
    """A constructor of a subclass could refuse what the check of its base accepts."""
    monkeypatch.setattr("rlcli.registry.loading.missing_libraries", lambda signature: [])
    classes = registry.load(kind, name).__mro__
    declaring = next(n for n, cls in enumerate(classes) if "ARGUMENT_CHECK" in vars(cls))
    making = next(
        (n for n, cls in enumerate(classes) if MAKING & set(vars(cls)) - {"__init__"}), 99
    )
    assert declaring <= making
