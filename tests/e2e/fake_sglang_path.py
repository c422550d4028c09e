"""The fake server as `python -m sglang.launch_server`."""

from pathlib import Path

HOME = Path(__file__).parents[2]


def fake_python_path(folder: Path) -> str:
    """A PYTHONPATH with which the fake, written into a folder, takes the place of SGLang."""
    package = folder / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "from rlcli.testing.fake_sglang import main\n\nmain()\n"
    )
    return f"{package.parent}:{HOME}"
