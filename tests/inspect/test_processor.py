"""Requesting bfloat16 on a processor that only emulates it causes a warning;
other recipes cause none."""

import pytest

from rlcli.inspect import processor
from rlcli.inspect.processor import slow_dtypes
from rlcli.recipe.resolve import load_recipe

ASKED = "models.actor.backend.args.dtype=bfloat16"
ON_CPU = "cluster.device=cpu"


@pytest.mark.parametrize(("flags", "settings", "warned"), [
    ({"avx2"}, (ASKED, ON_CPU), ["actor"]),
    ({"avx2"}, (ON_CPU,), []),
    ({"avx2"}, (ASKED, "cluster.device=cuda"), []),
    ({"avx2", "avx512_bf16"}, (ASKED, ON_CPU), []),
    ({"avx2", "amx_bf16"}, (ASKED, ON_CPU), []),
    (set(), (ASKED, ON_CPU), []),  # not Linux, or an unknown one
])  # fmt: skip
def test_warnings_about_emulated_bfloat16(monkeypatch, flags, settings, warned):
    monkeypatch.setattr(processor, "cpu_flags", lambda: flags)
    warnings = list(slow_dtypes(load_recipe("ppo_math", settings)))
    assert [text.split(": ")[1].split()[0] for text in warnings] == warned
    assert all(text.startswith(f"{ASKED}: ") or "command line" in text for text in warnings)
