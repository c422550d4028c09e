"""Components by name: listing, loading and building them, in a user's project."""

import textwrap

import pytest

from rlcli import registry
from rlcli.api.config import (
    DatasetAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from rlcli.errors import ProjectError, UnknownComponent, UsageError
from rlcli.recipe.resolve import load_recipe


@pytest.fixture
def write(tmp_path, monkeypatch, unregistered_afterwards):
    """Writes component files into a new user project;
    their components are unregistered afterwards."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


SIMPLE = """
    from dataclasses import dataclass
    from rlcli.api.component import register_{one}

    @register_{one}("{name}")
    @dataclass(frozen=True, kw_only=True)
    class Simple:
        knob: float = 1.0

        def __post_init__(self):
            if self.knob < 0:
                raise ValueError("knob must not be negative")
"""


def test_names_are_those_of_files_that_may_be_components(write):
    mine = write("interfaces/zz_mine.py", SIMPLE.format(one="interface", name="zz_mine"))
    for ignored in ("_shared.py", "Capital.py", "has-dash.py", "notes.txt"):
        write(f"interfaces/{ignored}", "raise SystemExit('imported')")
    names = registry.names("interfaces")
    assert names["zz_mine"] == mine
    assert list(names) == sorted(names)
    assert not {"_shared", "Capital", "has-dash", "notes"} & set(names)


def test_listing_imports_no_component(write):
    write("interfaces/zz_explodes.py", "raise SystemExit('imported')")
    assert "zz_explodes" in registry.names("interfaces")


def test_a_component_has_the_same_module_name_in_every_process(write):
    write("backends/zz_one.py", SIMPLE.format(one="backend", name="zz_one"))
    cls = registry.load("backends", "zz_one")
    assert (cls.__module__, cls.__qualname__) == ("rlcli.backends.zz_one", "Simple")
    assert registry.load("backends", "zz_one") is cls


def test_a_component_of_a_subfolder_keeps_its_name(write):
    mine = write("backends/fast/zz_inner.py", SIMPLE.format(one="backend", name="zz_inner"))
    assert registry.path_of("backends", "zz_inner") == mine
    assert registry.signature("backends", "zz_inner").class_name == "Simple"
    cls = registry.load("backends", "zz_inner")
    assert (
        cls.__module__
        == registry.module_of("backends", "zz_inner")
        == "rlcli.backends.fast.zz_inner"
    )


def test_a_subfolder_of_the_project_extends_a_built_in_one(write):
    text = "from ._scores import RightOrWrong\n" + textwrap.dedent(SIMPLE).format(
        one="interface", name="zz_reward"
    )
    write("interfaces/rewards/zz_reward.py", text)
    assert (
        registry.load("interfaces", "zz_reward").__module__ == "rlcli.interfaces.rewards.zz_reward"
    )
    assert (
        registry.load("interfaces", "math_reward").__module__
        == "rlcli.interfaces.rewards.math_reward"
    )


def test_a_component_that_hides_a_subfolder_is_refused(write):
    mine = write("interfaces/rewards.py", SIMPLE.format(one="interface", name="rewards"))
    with pytest.raises(ProjectError, match="'rewards' would hide the folder") as caught:
        registry.names("interfaces")
    assert caught.value.where == str(mine)


def test_a_dash_in_a_name_is_an_underscore_in_the_file(write):
    write("backends/zz_two_words.py", SIMPLE.format(one="backend", name="zz-two-words"))
    assert registry.load("backends", "zz-two-words") is registry.load("backends", "zz_two_words")
    assert registry.signature("backends", "zz-two-words").class_name == "Simple"


def test_a_misspelt_name_is_reported_with_a_guess_and_all_names(write, tmp_path):
    write("backends/zz_tracker.py", SIMPLE.format(one="backend", name="zz_tracker"))
    with pytest.raises(UnknownComponent) as caught:
        registry.load("backends", "zz_trakcer")
    assert caught.value.code == "R70"
    assert "did you mean 'zz_tracker'" in caught.value.what
    assert str(tmp_path / "backends") in caught.value.hint
    assert "zz_tracker" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["os.system", "a.b:c", "x.py", "../x", "", "PPO", "_ppo", "a" * 65, "1a", "a\nb"]
)
def test_paths_and_expressions_are_refused_as_names(name):
    for read in (registry.load, registry.signature):
        with pytest.raises(UnknownComponent) as caught:
            read("interfaces", name)
        assert caught.value.code == "R70"


def test_a_duplicate_name_is_reported_with_both_files_and_stops_only_what_uses_it(write):
    built_in = registry.names("backends")["fsdp"]
    mine = write("backends/fsdp.py", SIMPLE.format(one="backend", name="fsdp"))
    assert registry.signature("backends", "inference").class_name == "Inference"
    load_recipe("sft_math", ["models.actor.backend=deepspeed"])
    with pytest.raises(ProjectError) as caught:
        registry.path_of("backends", "fsdp")
    assert str(built_in) in caught.value.what
    assert str(mine) in caught.value.what
    assert "choose another name" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("import os\nimport no_such_library_zz\n", 2, "No module named 'no_such_library_zz'"),
        ("def f():\n    return 1 / 0\n\nf()\n", 4, "ZeroDivisionError"),
        ("x = (\n", 1, "SyntaxError"),
    ],
)
def test_an_error_inside_a_file_is_shown_with_its_line(write, text, line, shown):
    path = write("interfaces/zz_broken.py", text)
    with pytest.raises(ProjectError) as caught:
        registry.load("interfaces", "zz_broken")
    assert caught.value.where == f"{path}:{line}"
    assert shown in str(caught.value)


def test_a_file_must_register_the_name_of_the_file(write):
    write("backends/zz_file.py", SIMPLE.format(one="backend", name="zz_other"))
    write("backends/zz_silent.py", "class Forgotten: ...\n")
    for name in ("zz_file", "zz_silent"):
        for read in (registry.load, registry.signature):
            with pytest.raises(ProjectError):
                read("backends", name)


def test_arguments_are_coerced_checked_and_passed(write):
    write("backends/zz_knob.py", SIMPLE.format(one="backend", name="zz_knob"))
    backend = registry.make_backend(ModelBackendAbstraction("zz_knob", {"knob": 2}))
    assert backend.knob == 2.0
    assert type(backend.knob) is float
    for args in ({"knob": "2"}, {"knob": True}, {"nob": 1.0}, {"knob": -1.0}):
        with pytest.raises(UsageError, match="zz_knob"):
            registry.make_backend(ModelBackendAbstraction("zz_knob", args))


def test_nested_settings_become_dataclasses(write):
    write(
        "datasets/zz_nested.py",
        """
        from dataclasses import dataclass, field
        from rlcli.api.config import GenerationHyperparameters
        from rlcli.api.component import register_dataset
        from ._zz_inner import Inner

        @dataclass
        class Nested:
            util: object
            inner: Inner | None = None
            generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
            warm: GenerationHyperparameters = field(
                default_factory=lambda: GenerationHyperparameters(temperature=2.0)
            )

        register_dataset("zz_nested", Nested)
        """,
    )
    write(
        "datasets/_zz_inner.py",
        """
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Inner:
            sizes: tuple[int, ...] = (1,)
            label: str = "default"
        """,
    )
    args = {"inner": {"sizes": [2, 3]}, "generation": {"top_k": 5}, "warm": {"top_k": 6}}
    dataset = registry.make_dataset(DatasetAbstraction("zz_nested", args), util="the util")
    assert dataset.util == "the util"
    assert (dataset.inner.sizes, dataset.inner.label) == ((2, 3), "default")
    assert type(dataset.inner).__module__ == "rlcli.datasets._zz_inner"
    assert (dataset.generation.top_k, dataset.generation.temperature) == (5, 1.0)
    assert (dataset.warm.top_k, dataset.warm.temperature) == (6, 2.0)
    with pytest.raises(UsageError, match="util"):
        registry.make_dataset(
            DatasetAbstraction("zz_nested", {"util": "from the recipe"}), util="the util"
        )


BASE = """
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class ZzBase:
        size: int = {default}
"""
HEIR = """
    from dataclasses import dataclass
    from rlcli.api.component import register_backend
    from rlcli.backends._zz_base import ZzBase

    @register_backend("zz_heir")
    @dataclass(kw_only=True)
    class Heir(ZzBase):
        width: int = 1
"""


def test_a_signature_is_read_again_after_one_of_its_files_changed(write):
    """The file of the component, or that of a base class."""
    write("backends/_zz_base.py", BASE.format(default=3))
    heir = write("backends/zz_heir.py", HEIR)

    def defaults():
        return {
            argument.name: argument.default
            for argument in registry.signature("backends", "zz_heir").arguments
        }

    assert defaults() == {"size": 3, "width": 1}
    assert registry.signature("backends", "zz_heir") is registry.signature("backends", "zz_heir")
    write("backends/_zz_base.py", BASE.format(default=44))
    assert defaults() == {"size": 44, "width": 1}
    write("backends/zz_heir.py", HEIR.replace("= 1", "= 22"))
    assert defaults() == {"size": 44, "width": 22}
    heir.unlink()
    with pytest.raises(UnknownComponent):
        defaults()


DECLARING = """
    from dataclasses import dataclass, field
    from typing import ClassVar, Literal
    from rlcli.api.component import register_interface
    from rlcli.api.limits import check_arguments

    @register_interface("zz_declaring")
    @dataclass(kw_only=True)
    class Declaring:
        {declares}

        sizes: list[int] = field(default_factory=lambda: [1, 2])
        rate: float | Literal["auto"] = "auto"
        flag: bool = False

        def __post_init__(self):
            check_arguments(self)
"""


@pytest.mark.parametrize(
    ("declares", "says"),
    [
        ('NEEDS: ClassVar = ["sizes"]', "NEEDS of Declaring is"),
        ('NEEDS: ClassVar = {"sizes": ("flag",)}', "NEEDS of Declaring is"),
        ('LIMITS: ClassVar = ["sizes"]', "LIMITS of Declaring is"),
        ('LIMITS: ClassVar = {"sizes": {"ge": 1}}', r"LIMITS bounds sizes, .* list\[int\]"),
        ('LIMITS: ClassVar = {"rates": {"ge": 1}}', "LIMITS of Declaring names 'rates', which is"),
        ('NEEDS: ClassVar = {"flag": "rats=auto"}', "NEEDS of Declaring names 'rats', which is"),
        ('SYNONYMS: ClassVar = {"sise": "many"}', "SYNONYMS of Declaring names 'sise', which is"),
        ('FILES: ClassVar = ("path",)', "FILES of Declaring names 'path', which is none"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_named(write, declares, says):
    file = write("interfaces/zz_declaring.py", DECLARING.format(declares=declares))
    recipe = "extends: ppo_math\ngraph: {reward_inf: {interface: {type: zz_declaring}}}\n"
    write("recipes/declaring.yaml", recipe)
    with pytest.raises(UsageError, match=says) as caught:
        load_recipe("declaring", ["graph.reward_inf.interface.args.sizes=[3]"])
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ('{"row": {}, "right": "a", "wrong": "b"}', "it must be a tuple of dictionaries"),
        ('({"right": "a", "wrong": "b"},)', 'it needs "row", and "right" and "wrong"'),
        ('({"row": {}, "right": "a", "worng": "b"},)', 'it needs "row", and "right" and "wrong"'),
        ('({"row": "4", "rewards": {"4": 1}},)', "has the row '4'; it must be a dictionary"),
        ('({"row": {}, "rewards": {"4": "1"}},)', "they must give each text a number"),
        ('({"row": {}, "right": 4, "wrong": "5"},)', "has the response 4; it must be a text"),
    ],
)
def test_examples_that_cannot_be_read_are_refused_with_the_line_of_their_class(
    write, examples, says
):
    declares = f"EXAMPLES: ClassVar = {examples}"
    file = write("interfaces/zz_declaring.py", DECLARING.format(declares=declares))
    with pytest.raises(ProjectError, match=f"EXAMPLES of Declaring .*{says}") as caught:
        registry.load("interfaces", "zz_declaring")
    assert caught.value.where == f"{file}:7"


def test_a_requirement_that_is_no_tuple_is_refused_before_the_file_is_imported(write):
    write("interfaces/zz_declaring.py", DECLARING.format(declares='REQUIRES: ClassVar = ("torch")'))
    with pytest.raises(ProjectError, match="REQUIRES of Declaring is 'torch'; it must be a tuple"):
        registry.load("interfaces", "zz_declaring")


def test_limits_are_for_the_numbers_among_other_values(write):
    limits = 'LIMITS: ClassVar = {"rate": {"gt": 0}}'
    write("interfaces/zz_declaring.py", DECLARING.format(declares=limits))
    for rate in ("auto", 0.5):
        described = ModelInterfaceAbstraction("zz_declaring", {"rate": rate})
        assert registry.make_interface(described).rate == rate
    with pytest.raises(UsageError, match="greater than 0"):
        registry.make_interface(ModelInterfaceAbstraction("zz_declaring", {"rate": -1.0}))


def test_a_default_that_is_made_anew_needs_nothing(write):
    needs = 'NEEDS: ClassVar = {"sizes": "flag"}'
    write("interfaces/zz_declaring.py", DECLARING.format(declares=needs))
    for args in ({}, {"sizes": [1, 2]}, {"sizes": [3], "flag": True}):
        registry.make_interface(ModelInterfaceAbstraction("zz_declaring", args))
    with pytest.raises(UsageError, match="sizes needs flag; flag is False"):
        registry.make_interface(ModelInterfaceAbstraction("zz_declaring", {"sizes": [3]}))
