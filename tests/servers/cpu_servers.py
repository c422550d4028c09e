"""Servers that run on a CPU: `make test-servers` makes their environments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "max_running_requests": 32,
        "context_length": 128,
        "mem_fraction_static": 0.1,
        "skip_server_warmup": True,
        "attention_backend": "torch_native",
        "enable_deterministic_inference": True,
    },
    "vllm": {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        # a request with a seed that is prefilled in chunks ends the CPU build of 0.32
        "no_enable_chunked_prefill": True,
        "no_async_scheduling": True,
    },
}
"""Backend → options that its server needs on a CPU. Small, in float32."""
ENVIRONMENT = {
    "sglang": {
        "PYTHONPATH": str(Path(__file__).with_name("on_cpu")),
        "SGLANG_USE_CPU_ENGINE": "1",
    },
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}
"""Backend → variables of its server's process."""


def backend_arguments(backend: str, **options: Any) -> dict[str, Any]:
    """Arguments of a backend that starts servers on a CPU, with further options."""
    variable = f"RLCLI_{backend.upper()}_PYTHON"
    python = os.environ.get(variable) or str(HOME / f".venv-{backend}" / "bin" / "python")
    return {
        "python": python,
        "options": {**OPTIONS[backend], **options},
        "environment": ENVIRONMENT[backend],
    }
