"""Signatures are read from source text, without importing anything."""

import textwrap
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlcli import registry
from rlcli.errors import ProjectError

COMPONENT = '''
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional

import a_library_that_nobody_has
from rlcli.api import config as settings
from rlcli.api.model import ModelInterface, register_interface

from ._zz_base import Base, Mode

if TYPE_CHECKING:
    from ._zz_base import Inner as Nested


@register_interface("zz_all")
@dataclass(kw_only=True)
class Everything(Base, ModelInterface):
    """Takes every kind of argument
    there is.

    And more.
    """

    _: KW_ONLY
    constant: ClassVar[int] = 1
    path: Path
    """Where it is."""

    size: int = 2**10
    rate: float = 1e-3
    """How fast.

    In steps."""
    flag: bool = False
    mode: Mode = "fast"
    maybe: int | None = None
    old_style: Optional[str] = None
    either: int | str = -1
    numbers: Sequence[float] = ()
    table: Mapping[str, list[int]] = field(default_factory=dict)
    pair: tuple[int, str] = (1, "a")
    anything: Any = None
    nested: Nested = field(default_factory=Nested)
    preset: Nested = field(default_factory=lambda: Nested(depth=3))
    generation: "settings.GenerationHyperparameters | None" = None
    hook: a_library_that_nobody_has.Hook = a_library_that_nobody_has.default
    copy: bool = True
    state: int = field(init=False, default=0)

    def train_step(self, model, data, mb_spec): ...

    inference = train_step
'''
BASE = '''
from dataclasses import dataclass
from typing import Literal

Mode = Literal["fast", "slow"]


@dataclass
class Inner:
    depth: int
    """How deep."""
    more: "Inner | None" = None


@dataclass(kw_only=True)
class Base:
    inherited: str = "base"
    """From the base."""
    rate: float = 5.0
    state: int = 3

    def shared(self): ...
'''


@pytest.fixture
def write(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


@pytest.fixture
def signature(write):
    write("interfaces/_zz_base.py", BASE.replace('"Inner | None"', '"int | None"'))
    write("interfaces/zz_all.py", COMPONENT)
    return registry.signature("interfaces", "zz_all")


def test_fields_come_with_types_defaults_docs_and_lines(signature, tmp_path):
    by_name = {argument.name: argument for argument in signature.arguments}
    # fields of the base first, also overridden ones
    assert list(by_name)[:2] == ["inherited", "rate"]
    assert not {"_", "constant", "state"} & set(by_name)
    assert by_name["path"].required
    assert by_name["path"].annotation == "Path"
    assert by_name["path"].doc == "Where it is."
    assert (by_name["rate"].default, by_name["rate"].doc) == (0.001, "How fast.\n\nIn steps.")
    assert (by_name["size"].default, by_name["size"].default_text) == (registry.COMPUTED, "2 ** 10")
    assert by_name["either"].default == -1
    assert by_name["table"].default == {}
    assert [inner.name for inner in by_name["nested"].fields] == ["depth", "more"]
    assert by_name["inherited"].path == tmp_path / "interfaces" / "_zz_base.py"
    line = COMPONENT.splitlines().index("    path: Path") + 1
    assert by_name["path"].line == line


def test_defaults_of_an_argument_fill_fields_that_a_recipe_leaves_out(signature):
    """Fields that a recipe leaves out have the default of the argument, not of the dataclass."""
    by_name = {argument.name: argument for argument in signature.arguments}
    assert by_name["nested"].fields[0].required
    shown = by_name["preset"].fields[0]
    assert (shown.required, shown.default, shown.default_text) == (False, 3, "3")
    assert by_name["preset"].default_text == "Nested(depth=3)"
    model = signature.model()
    assert model.model_validate({"path": "x", "preset": {}}).arg_preset.arg_depth == 3
    assert model.model_validate({"path": "x", "preset": {"depth": 5}}).arg_preset.arg_depth == 5


def test_a_signature_describes_the_class(signature):
    assert signature.class_name == "Everything"
    assert signature.doc == "Takes every kind of argument there is."
    assert signature.methods == {
        "train_step",
        "inference",
        "shared",
    }  # `generate` of the contract is not included
    assert not signature.has_unread_bases


GOOD = [
    {"size": 3},
    {"rate": 1},
    {"mode": "slow"},
    {"maybe": None},
    {"old_style": "x"},
    {"either": "x"},
    {"numbers": [1, 2.5]},
    {"table": {"a": [1]}},
    {"pair": [2, "b"]},
    {"anything": {"a": [1, None]}},
    {"nested": {"depth": 2}},
    {"preset": {}},
    {"generation": {"greedy": True}},
    {"generation": None},
    {"copy": False},
]
BAD = [
    ({"size": True}, ("size",)),
    ({"size": "3"}, ("size",)),
    ({"size": 3.0}, ("size",)),
    ({"rate": True}, ("rate",)),
    ({"rate": "0.1"}, ("rate",)),
    ({"flag": 1}, ("flag",)),
    ({"flag": "yes"}, ("flag",)),
    ({"mode": "medium"}, ("mode",)),
    ({"maybe": "x"}, ("maybe",)),
    ({"numbers": "12"}, ("numbers",)),
    ({"numbers": [1, "x"]}, ("numbers", 1)),
    ({"table": {"a": ["x"]}}, ("table", "a", 0)),
    ({"pair": [1]}, ("pair", 1)),
    ({"nested": {}}, ("nested", "depth")),
    ({"nested": {"depth": 1, "dept": 2}}, ("nested", "dept")),
    ({"generation": {"top_p": 2.0}}, ("generation",)),
    ({"hook": "x"}, ("hook",)),
    ({"state": 1}, ("state",)),
    ({"unknown": 1}, ("unknown",)),
]


@pytest.mark.parametrize("args", GOOD, ids=str)
def test_valid_arguments_are_accepted(signature, args):
    checked = signature.model().model_validate({"path": "x", **args})
    assert len(checked.model_fields_set) == 2
    assert isinstance(checked.arg_path, Path)


@pytest.mark.parametrize(("args", "loc"), BAD, ids=str)
def test_invalid_arguments_are_reported_with_their_location(signature, args, loc):
    with pytest.raises(ValidationError) as caught:
        signature.model().model_validate({"path": "x", **args})
    assert [error["loc"] for error in caught.value.errors()] == [loc]


def test_a_missing_required_argument_is_reported(signature):
    with pytest.raises(ValidationError) as caught:
        signature.model().model_validate({})
    assert [(error["loc"], error["type"]) for error in caught.value.errors()] == [
        (("path",), "missing")
    ]


def test_a_class_that_is_not_a_dataclass_has_the_arguments_of_init(write):
    write(
        "datasets/zz_plain.py",
        """
        from rlcli.api.component import register_dataset
        import torch

        class Plain(torch.utils.data.Dataset):
            def __init__(
                self, util, path: str, limit: int | None = None, *, strict: bool = True
            ): ...

        register_dataset("zz_plain", Plain)
        """,
    )
    plain = registry.signature("datasets", "zz_plain")
    assert [(a.name, a.required, a.default) for a in plain.arguments] == [
        ("path", True, None),
        ("limit", False, None),
        ("strict", False, True),
    ]
    assert plain.has_unread_bases


def test_a_dataset_must_take_util(write):
    write(
        "datasets/zz_lonely.py",
        """
        from dataclasses import dataclass
        from rlcli.api.component import register_dataset

        @register_dataset("zz_lonely")
        @dataclass
        class Lonely:
            path: str
        """,
    )
    with pytest.raises(ProjectError, match="util"):
        registry.signature("datasets", "zz_lonely")


def test_a_recursive_dataclass_is_refused(write):
    write("interfaces/_zz_base.py", BASE)
    write("interfaces/zz_all.py", COMPONENT)
    with pytest.raises(ProjectError, match="type of more cannot be read"):
        registry.signature("interfaces", "zz_all").model()


def test_an_edited_file_is_read_again(write):
    text = """
        from dataclasses import dataclass
        from rlcli.api.component import register_backend

        @register_backend("zz_edit")
        @dataclass
        class Edited:
            {field}: int = 1
    """
    write("backends/zz_edit.py", text.format(field="before"))
    assert registry.signature("backends", "zz_edit").arguments[0].name == "before"
    write("backends/zz_edit.py", text.format(field="afterwards"))
    assert registry.signature("backends", "zz_edit").arguments[0].name == "afterwards"


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_component_documents_its_arguments(kind):
    for name in registry.names(kind):
        component = registry.signature(kind, name)
        component.model().model_json_schema()
        assert component.doc, name
        assert [argument.name for argument in component.arguments if not argument.doc] == [], name
