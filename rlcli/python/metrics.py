"""The metrics of a run as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.observe.charts import metric_key
from rlcli.observe.series import number

if TYPE_CHECKING:
    import numpy as np


class Metrics(Mapping[str, "np.ndarray"]):
    """Name → its values, one for each of `steps`, as float64; nan where a step has none.

    A name is found as `rlcli plot` finds it: a whole key (`actor/grad_norm`), the end of one
    (`grad_norm`), or a curve (`reward`, `kl`, `accuracy`).
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        """`records`: those of a metrics.jsonl."""
        import numpy as np

        self._records = records
        keys = dict.fromkeys(key for record in records for key in record)
        self._keys = [key for key in keys if key != "step" and self._is_number(key)]
        self.steps = np.array([record["step"] for record in records], dtype=np.int64)
        """The step of each value; 0 is the evaluation before the first step."""

    def __getitem__(self, name: str) -> np.ndarray:
        import numpy as np

        key = metric_key(name, self._keys)
        if key is None:
            raise KeyError(f"{name}; the run has {', '.join(self._keys) or 'no metrics yet'}")
        values = (number(record.get(key)) for record in self._records)
        return np.array([np.nan if value is None else value for value in values])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) else "no step yet"
        return f"<metrics of {span}: {', '.join(self._keys)}>"

    def _is_number(self, key: str) -> bool:
        return any(number(record.get(key)) is not None for record in self._records)
