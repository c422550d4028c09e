"""Watching a run costs no heavy import until something is drawn or written to TensorBoard."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import rlcli.observe
for module in pkgutil.iter_modules(rlcli.observe.__path__):
    importlib.import_module(f"rlcli.observe.{module.name}")
print(sorted({"torch", "transformers", "matplotlib", "tensorboardX", "numpy"} & set(sys.modules)))
"""


def test_importing_observe_loads_no_heavy_library():
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
