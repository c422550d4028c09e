"""The fake server as `python -m sglang.launch_server`."""

from pathlib import Path

HOME = Path(__file__).parents[2]


def path_of_the_fake(folder: Path) -> str:
    """PYTHONPATH of processes to which the fake, put into a folder, is SGLang."""
    package = folder / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("from rlcli.testing.fake_sglang import main\n\nmain()\n")
    return f"{package.parent}:{HOME}"
