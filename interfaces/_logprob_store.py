"""A folder of sequences' log-probs, looked up by the sequences' tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from rlcli.errors import DataError
from rlcli.files import make_folder, replace_file
from rlcli.ops.reduce import AllReduce, identity


class LogprobStore:
    """Log-probs present when the store was opened, plus those that the ranks of the role have
    written since: ranks that compute together find the same, whatever others write meanwhile. So
    does a run that is resumed and one that is not: what is stored is not computed again in another
    batch, where it is the same up to rounding only.

    A part is one safetensors file: `keys` [n, 32] uint8, `lengths` [n], and `logprobs`,
    concatenated. Parts are never changed, and are read piece by piece.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser()
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._open(path)

    def read(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The log-probs of each token sequence, [length - 1]; None where not stored."""
        ranges = [self._places.get(_key(tokens)) for tokens in sequences]
        return [None if stored is None else _rows(*stored) for stored in ranges]

    def write(
        self,
        sequences: Sequence[torch.Tensor],
        logprobs: Sequence[torch.Tensor],
        all_reduce: AllReduce = identity,
    ) -> None:
        """Add log-probs of sequences that are not stored yet, each rank its own, none if it has
        computed none. `all_reduce` sums over the ranks, which all take part."""
        keys = [_key(tokens) for tokens in sequences]
        digest = hashlib.sha256(b"".join(keys)).digest()[:16]
        number = torch.tensor(int.from_bytes(digest[:6]) if keys else 0)
        call = int(all_reduce(number))
        if not call:  # all of them found everything
            return
        if keys:
            self._write(f"{call:016x}-{digest.hex()}", keys, logprobs)
        all_reduce(number)  # all have written
        for path in sorted(self.folder.glob(f"{call:016x}-*.safetensors")):
            self._open(path)

    def _write(self, name: str, keys: Sequence[bytes], logprobs: Sequence[torch.Tensor]) -> None:
        from safetensors.torch import save

        lengths = torch.tensor([len(row) for row in logprobs])
        content = save(
            {
                "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 32),
                "lengths": lengths,
                "logprobs": torch.cat([row.float().cpu() for row in logprobs]),
            }
        )
        make_folder(self.folder)
        replace_file(self.folder / f"{name}.safetensors", content)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as shard:
                keys, lengths = shard.get_tensor("keys"), shard.get_tensor("lengths")
                ends = lengths.cumsum(0).tolist()
                if (
                    tuple(keys.shape) != (len(ends), 32)
                    or shard.get_slice("logprobs").get_shape() != ends[-1:]
                ):
                    raise ValueError("its tensors do not fit together")
        except (OSError, ValueError, SafetensorError) as problem:
            raise DataError(
                f"{path} holds no log-probs: {problem}", hint="delete it: it is computed again"
            ) from problem
        for row, start, end in zip(keys.numpy(), [0, *ends], ends, strict=False):
            self._places[row.tobytes()] = path, start, end


def _rows(path: Path, start: int, end: int) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as shard:  # not kept open: there may be thousands of parts
        rows: torch.Tensor = shard.get_slice("logprobs")[start:end]
    return rows


def _key(tokens: torch.Tensor) -> bytes:
    return hashlib.sha256(tokens.cpu().to(torch.int64).numpy().tobytes()).digest()
