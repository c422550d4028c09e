"""flash-attn attends as torch does, is called as its own sources say, and is imported only where a
GPU can use it."""

import json
import sys
from types import ModuleType

import pytest
import torch
from fake_flash_attn import RECORD, flash_attn_installed, varlen_function
from flash_attn_sources import parameters_of, problem_of_our_call, report
from pretend_cuda import needs_pretend_device, pretend_cuda

from rlcli.ops import flash_attention as module
from rlcli.ops.attention import Scoring, packed_attention
from rlcli.ops.flash_attention import LIBRARIES, FlashAttention, flash_attention

NAMES = [library.name for library in LIBRARIES]
BY_NAME = {library.name: library for library in LIBRARIES}
RECORDED = json.loads(RECORD.read_text())
FUNCTIONS = {name: of for package in RECORDED.values() for name, of in package["functions"].items()}
LENGTHS = (5, 1, 12, 3)


@pytest.mark.parametrize("name", NAMES)
def test_our_call_fits_the_parameters_recorded_from_the_sources(name):
    assert problem_of_our_call(name, FUNCTIONS[name]) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parameter", ["cu_seqlens_q", "window_size", "softcap"])
def test_a_parameter_that_is_renamed_in_the_sources_is_reported(name, parameter, capsys):
    changed = json.loads(json.dumps(FUNCTIONS[name]))
    for names in (changed["required"], list(changed["optional"])):
        if parameter in names:
            names.remove(parameter)
    changed["optional"].pop(parameter, None)
    assert parameter in problem_of_our_call(name, changed)
    newest = {"flash-attn": {"version": "9.9", "sha256": "", "functions": {name: changed}}}
    assert report(newest, RECORDED) == 1
    assert parameter in capsys.readouterr().out


def test_parameters_are_read_from_a_source_file_without_executing_it():
    source = "raise SystemExit\ndef flash_attn_varlen_func(q, k, *, softcap=0.0): ...\n"
    with pytest.raises(AssertionError):
        parameters_of(source)
    assert parameters_of(source.replace("*, ", "")) == {
        "required": ["q", "k"],
        "optional": {"softcap": 0.0},
    }


def test_the_recorded_distributions_are_named_by_version_and_digest():
    for package in RECORDED.values():
        assert package["version"][0].isdigit()
        assert len(bytes.fromhex(package["sha256"])) == 32


SCORINGS = {
    "plain": Scoring(),
    "scaled": Scoring(scale=0.3),
    "window": Scoring(window=4),
    "window of one": Scoring(window=1),
    "window of all": Scoring(window=12),
    "capped": Scoring(softcap=1.5),
    "capped window": Scoring(scale=0.5, window=3, softcap=1.5),
}


@needs_pretend_device
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", NAMES)
def test_flash_attn_attends_as_torch_does(name, scoring, kv_heads):
    torch.manual_seed(0)
    total = sum(LENGTHS)
    states = [torch.randn(1, heads, total, 8).bfloat16() for heads in (4, kv_heads, kv_heads)]
    case = SCORINGS[scoring], torch.randn(1, total, 4, 8)
    library = BY_NAME[name]
    flash = FlashAttention(library, varlen_function(library))
    with pretend_cuda() as device:
        of_flash = _gradients(packed_attention(LENGTHS, device, flash), states, *case)
        of_torch = _gradients(packed_attention(LENGTHS, device), states, *case)
    on_cpu = packed_attention(LENGTHS, torch.device("cpu"))
    exact = _gradients(on_cpu, [x.double() for x in states], *case)
    for mine, theirs, reference in zip(of_flash, of_torch, exact, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(mine, reference, atol=2e-2, rtol=2e-2)


def _gradients(attention, states, scoring, weights):
    """The result and the gradients of its product with `weights`, in float64 on the CPU."""
    leaves = [x.to(attention.device).requires_grad_() for x in states]
    out = attention.attend(*leaves, scoring)
    (out * weights.to(out)).sum().backward()
    return [x.detach().cpu().double() for x in (out, *(leaf.grad for leaf in leaves))]


@needs_pretend_device
@pytest.mark.parametrize(
    ("capability", "head_dim", "installed", "chosen"),
    [
        (8, 64, NAMES, "FlashAttention-2"),
        (9, 64, NAMES, "FlashAttention-3"),
        (9, 64, ["FlashAttention-4", "FlashAttention-2"], "FlashAttention-4"),
        (10, 64, NAMES, "FlashAttention-4"),
        (10, 192, NAMES, "FlashAttention-2"),
        (8, 64, ["FlashAttention-3", "FlashAttention-4"], None),
        (8, 288, NAMES, None),
        (8, 20, NAMES, None),
        (7, 64, NAMES, None),
        (9, 64, [], None),
    ],
)
def test_auto_takes_the_newest_library_for_the_gpu_and_the_heads(
    capability, head_dim, installed, chosen
):
    with pretend_cuda(capability=(capability, 0)) as device, flash_attn_installed(*installed):
        flash = flash_attention("auto", device, True, head_dim)
        assert (flash.library.name if flash else None) == chosen
        assert flash_attention("torch", device, True, head_dim) is None
        assert flash_attention("auto", device, False, head_dim) is None
        if chosen is None:
            with pytest.raises(ValueError, match="FlashAttention-2: "):
                flash_attention("flash", device, True, head_dim)


def test_nothing_is_imported_for_a_device_or_precision_without_kernels(monkeypatch):
    monkeypatch.setattr(module, "import_module", None)
    cpu = torch.device("cpu")
    assert flash_attention("auto", cpu, True, 64) is None
    assert flash_attention("torch", torch.device("cuda"), True, 64) is None
    assert flash_attention("auto", torch.device("cuda"), False, 64) is None
    with pytest.raises(ValueError, match="CUDA devices, not on cpu"):
        flash_attention("flash", cpu, True, 64)
    with pytest.raises(ValueError, match="not in float32"):
        flash_attention("flash", torch.device("cuda"), False, 64)


@needs_pretend_device
def test_a_broken_installation_is_reported(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(module, "import_module", broken)
    with pretend_cuda() as device:
        with pytest.warns(UserWarning, match="FlashAttention-2 is installed, .*undefined symbol"):
            assert flash_attention("auto", device, True, 64) is None
        is_refused = pytest.raises(ValueError, match="undefined symbol")
        with pytest.warns(UserWarning, match="undefined symbol"), is_refused:
            flash_attention("flash", device, True, 64)


@needs_pretend_device
def test_a_version_without_a_parameter_of_our_call_is_not_taken(monkeypatch):
    old = ModuleType("flash_attn")
    old.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, causal: None
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    with pretend_cuda() as device:
        assert flash_attention("auto", device, True, 64) is None
        with pytest.raises(ValueError, match="without max_seqlen_q, max_seqlen_k, softmax_scale"):
            flash_attention("flash", device, True, 64)
