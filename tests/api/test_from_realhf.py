"""The examples of ReaLHF's and AReaL's documentation with our imports; docs/from-realhf.md lists
the differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rlcli import registry
from rlcli.api import config as config_api
from rlcli.api import data as data_api
from rlcli.api import model as model_api
from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.elsewhere import INSTEAD
from rlcli.errors import ProjectError, UnknownComponent, UsageError

CUSTOM = """
from dataclasses import dataclass

from rlcli.api import model as model_api


@dataclass
class CustomInterface(model_api.ModelInterface):
    # Custom parameters
    custom_param: float = 1.0

    def train_step(self, model, data, mb_spec):
        module = model.module
        module.train()
        stats = module.train_batch(
            input_=data,
            loss_fn=custom_loss_function,
            loss_weight_fn=lambda x: x.data["mask"].count_nonzero(),
            token_normalize_scope="global",
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        model.inc_version()
        return stats

    def save(self, model, save_dir):
        module = model.module
        module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)


def custom_loss_function(output, micro_batch):
    return -output.logprobs.sum(), {}


model_api.register_interface("from_realhf_custom", CustomInterface)
"""


class SentimentScoringInterface(model_api.ModelInterface):
    def __init__(self):
        self.__post_init__()

    def __post_init__(self):
        super().__post_init__()
        self.score_model = lambda texts: torch.tensor([float(len(text)) for text in texts])

    @torch.no_grad()
    def inference(self, model: model_api.Model, input_: SequenceSample) -> SequenceSample:
        bs = input_.bs
        return SequenceSample.from_default(
            ids=input_.ids,
            seqlens=[1 for _ in range(bs)],
            data={"rewards": self.score_model(["good"] * bs)},
        )


class FSDPEngine(model_api.PipelinableEngine):
    def __init__(self, module):
        self.module = module

    def train_batch(self, *args, **kwargs):
        return {"loss": 0.0}


class FSDPBackend(model_api.ModelBackend):
    def _initialize(self, model):
        model.module = FSDPEngine(model.module)
        return model


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A user's project with the documented interface."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    (tmp_path / "interfaces" / "from_realhf_custom.py").write_text(CUSTOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    return tmp_path


def test_the_documented_interface_can_be_registered_and_built(project: Path):
    interface = model_api.make_interface(
        ModelInterfaceAbstraction(type_="from_realhf_custom", args={"custom_param": 2.0})
    )
    assert (type(interface).__name__, interface.custom_param) == ("CustomInterface", 2.0)


def test_an_engine_may_lack_methods_that_are_not_called():
    model = model_api.Model("actor", None, None, torch.device("cpu"))
    engine = FSDPBackend()._initialize(model).module
    assert engine.train_batch() == {"loss": 0.0}
    with pytest.raises(NotImplementedError, match="FSDPEngine has no generate"):
        engine.generate()


def test_the_documented_scoring_interface_returns_rewards():
    """`super().__post_init__()`, `inference` without a MicroBatchSpec, and one length per sample"""
    model = model_api.Model("reward", None, None, torch.device("cpu"))
    ids = SequenceSample.from_default(
        ids=["a", "b"], seqlens=[2, 3], data={"packed_input_ids": torch.zeros(5).long()}
    )
    out = model_api.call_interface(
        SentimentScoringInterface(), "inference", model, ids, MicroBatchSpec()
    )
    assert out.data["rewards"].tolist() == [4.0, 4.0]


def test_flat_lengths_of_several_responses_are_refused():
    with pytest.raises(ValueError, match=r"give a list for each sample: \[\[1, 1\], \[1, 1\]\]"):
        SequenceSample.from_default(
            ids=["a", "b"], seqlens=[1] * 4, data={"rewards": torch.zeros(4)}
        )


def test_the_documented_sample_accepts_tensors_as_lengths():
    sample = data_api.SequenceSample(
        keys=["packed_input_ids", "prompt_lens"],
        data={
            "packed_input_ids": torch.tensor([1, 2, 3, 4, 5]),
            "prompt_lens": torch.tensor([2], dtype=torch.int32),
        },
        ids=[7],
        seqlens={
            "packed_input_ids": [torch.tensor([3, 2], dtype=torch.int32)],
            "prompt_lens": [torch.tensor([1], dtype=torch.int32)],
        },
    )
    assert sample.seqlens["packed_input_ids"] == [[3, 2]]
    assert sample.as_json_compatible() == sample.as_json()


def test_a_renamed_argument_is_refused_with_the_valid_names():
    with pytest.raises(UsageError, match=r"dataset_path: .*; it takes path, "):
        data_api.make_dataset(
            data_api.DatasetAbstraction("prompt_answer", args={"dataset_path": "x"}), None
        )


@pytest.mark.parametrize(
    "parameters", ["self, model", "self, model, data, spec, extra", "self, model, data, *, extra"]
)
def test_a_wrong_signature_is_reported_without_importing(project: Path, parameters: str):
    text = CUSTOM.replace("self, model, data, mb_spec", parameters)
    (project / "interfaces" / "from_realhf_custom.py").write_text(text)
    with pytest.raises(ProjectError, match="train_step of CustomInterface takes") as caught:
        registry.signature("interfaces", "from_realhf_custom")
    assert caught.value.where.endswith("from_realhf_custom.py:12")
    assert caught.value.hint == "it is called with (model, data, mb_spec)"


@pytest.mark.parametrize(("module", "name", "instead"), [
    (config_api, "PPOConfig", "an experiment is a recipe"),
    (config_api, "register_quickstart_exp", "an experiment is a recipe"),
    (config_api, "ModelBackend", "`models.ROLE` of a recipe"),
    (config_api, "PairedComparisonDatasetConfig", "datasets.train"),
    (data_api, "NamedArray", "SequenceSample"),
])  # fmt: skip
def test_a_missing_name_is_reported_with_its_replacement(module, name: str, instead: str):
    with pytest.raises(ProjectError, match=f"rlcli has no {name}") as caught:
        getattr(module, name)
    assert instead in str(caught.value.hint)
    assert not hasattr(module, f"{name}s")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("SFTConfig", "an experiment is a recipe"),
        ("MFCDef", "`graph.CALL"),
        ("PromptAnswerDatasetConfig", "datasets.train"),
        ("SequenceSample", "from rlcli.api.data import SequenceSample"),
        ("ModelInterface", "from rlcli.api.model import ModelInterface"),
    ],
)
def test_a_name_imported_from_the_package_is_reported_with_its_place(name: str, instead: str):
    with pytest.raises(ProjectError, match=f"rlcli has no {name}") as caught:
        exec(f"from rlcli import {name}", {})
    assert instead in str(caught.value.hint)


def test_imports_that_the_errors_name_exist():
    for advice in INSTEAD["rlcli"].values():
        if advice.startswith("from "):
            exec(advice, {})


def test_other_names_are_missing_from_the_package_as_usual():
    with pytest.raises(ImportError, match="cannot import name 'zzz' from 'rlcli'"):
        exec("from rlcli import zzz", {})


def test_the_documented_ppo_leads_to_the_interfaces_that_it_is_here():
    with pytest.raises(UnknownComponent, match="no interface is named 'ppo'") as caught:
        model_api.make_interface(ModelInterfaceAbstraction(type_="ppo", args={"eps_clip": 0.2}))
    assert "ppo_actor, ppo_critic and" in str(caught.value.hint)
    for name in re.findall(r"ppo_\w+|gae", str(caught.value.hint)):
        registry.path_of("interfaces", name)


def test_the_names_that_the_page_documents_exist():
    page = Path(__file__).parents[2] / "docs" / "from-realhf.md"
    documented = set(re.findall(r"`(Model|ModelBackend|TrainEngine)\.(\w+)`", page.read_text()))
    assert len(documented) >= 9
    for owner, name in documented:
        cls = getattr(model_api, owner)
        assert hasattr(cls, name) or name in cls.__annotations__, f"{owner}.{name}"
