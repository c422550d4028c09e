"""Compare our call of flash-attn with its newest source distributions, which pip downloads.

    python tests/ops/flash_attn_sources.py [--record]

Nothing is built. `--record` writes the parameters of `flash_attn_varlen_func`, with version and
sha256 of the distribution, where `make test` compares our call with them. The exit code is 1 if our
call no longer fits, and 2 if nothing could be downloaded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from fake_flash_attn import RECORD, signature_of

from rlcli.ops.attention import Scoring
from rlcli.ops.flash_attention import LIBRARIES, arguments
from rlcli.ops.packing import Bounds

FUNCTION = "flash_attn_varlen_func"
SOURCES = {
    "flash-attn": {
        "FlashAttention-2": "flash_attn/flash_attn_interface.py",
        "FlashAttention-3": "hopper/flash_attn_interface.py",
    },
    "flash-attn-4": {"FlashAttention-4": "interface.py"},
}
"""Distribution → library → the file in it with its function."""
LONGEST_SOURCE = 4 << 20


def download(distribution: str, folder: Path) -> Path:
    """The newest source distribution, by the index that pip is configured with. To name it, pip
    runs its setup: without the variable, that of flash-attn needs a CUDA toolkit, and with
    isolation it lacks torch. Raises OSError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--pre", "--no-deps"]
    command += ["--no-binary", distribution, "--dest", str(folder), distribution]
    command += ["--no-build-isolation"] if distribution == "flash-attn" else []
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("pip did not finish in 5 minutes") from error
    archives = list(folder.glob("*.tar.gz"))
    if completed.returncode or len(archives) != 1:
        raise OSError(completed.stderr.strip()[-2000:] or "pip downloaded no source distribution")
    return archives[0]


def described(archive: Path, sources: dict[str, str]) -> dict[str, Any]:
    """What is recorded of a distribution."""
    name = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as members:
        functions = {
            library: parameters_of(read(members, f"{name}/{file}"))
            for library, file in sources.items()
        }
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return {"version": name.rpartition("-")[2], "sha256": digest, "functions": functions}


def read(members: tarfile.TarFile, path: str) -> str:
    file = members.extractfile(path)
    assert file is not None
    return file.read(LONGEST_SOURCE).decode()


def parameters_of(source: str) -> dict[str, Any]:
    """Of the function in a source file, which is not executed."""
    tree = ast.parse(source)
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    )
    assert not function.args.kwonlyargs, "record parameters that are keywords only as such"
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    required = names[: len(names) - len(defaults)]
    return {
        "required": required,
        "optional": dict(zip(names[len(required) :], defaults, strict=True)),
    }


def problem_of_our_call(library: str, parameters: dict[str, Any]) -> str | None:
    """Why our call does not fit these parameters."""
    (called,) = (known for known in LIBRARIES if known.name == library)
    none = Bounds.of(())
    try:
        signature_of(parameters).bind("q", "k", "v", **arguments(called, none, none, Scoring()))
    except TypeError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    is_recorded = parser.parse_args().record
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    newest: dict[str, Any] = {}
    for distribution, sources in SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                archive = download(distribution, Path(folder))
            except OSError as error:
                print(f"{distribution}: {error}", file=sys.stderr)
                return 2
            newest[distribution] = described(archive, sources)
    if is_recorded:
        RECORD.write_text(json.dumps(newest, indent=2) + "\n")
    return report(json.loads(json.dumps(newest)), recorded)  # tuples are lists in the record


def report(newest: dict[str, Any], recorded: dict[str, Any]) -> int:
    """Print how the newest distributions differ from those recorded; 1 if our call does not fit."""
    failed = False
    for distribution, description in newest.items():
        before = recorded.get(distribution, {})
        state = "as recorded" if description == before else f"recorded: {before.get('version')}"
        print(f"{distribution} {description['version']} ({state})")
        for library, parameters in description["functions"].items():
            problem = problem_of_our_call(library, parameters)
            failed = failed or problem is not None
            is_same = parameters == before.get("functions", {}).get(library)
            print(f"  {library}: {problem or 'our call fits'}{'' if is_same else '; changed'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
