"""Builds the package as in a wheel, with links to its files: components are inside `rlcli` there,
where tools that read code without running it find them.

    python tests/house/package_tree.py build/package
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENT_FOLDERS = ("interfaces", "backends", "datasets")


def build(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for source in sorted((ROOT / "rlcli").rglob("*.py")):
        _link(source, target / source.relative_to(ROOT))
    for folder in COMPONENT_FOLDERS:
        for source in sorted((ROOT / folder).rglob("*.py")):
            link = target / "rlcli" / source.relative_to(ROOT)
            _link(source, link)
            # such tools ignore subfolders that are not packages
            (link.parent / "__init__.py").touch()
    _link(ROOT / "pyproject.toml", target / "pyproject.toml")


def _link(source: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(source)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
