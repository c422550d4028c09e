"""The fake servers as `python -m sglang.launch_server` and as vLLM's API server."""

from pathlib import Path

HOME = Path(__file__).parents[2]
FAKES = {
    "fake_sglang": Path("sglang", "launch_server.py"),
    "fake_vllm": Path("vllm", "entrypoints", "openai", "api_server.py"),
}


def fake_python_path(folder: Path) -> str:
    """A PYTHONPATH with which the fakes, written into a folder, take the place of servers."""
    root = folder / "path"
    for fake, file in FAKES.items():
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(f"from {fake} import main\n\nmain()\n")
    return f"{root}:{HOME}:{Path(__file__).parent}"
