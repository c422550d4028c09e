"""What a call returned: checked before anything is stored, counted or trained on, and the numbers
that are read out of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef
from rlcli.api.key_meaning import UNPLAYED
from rlcli.api.output_checks import (
    Origin,
    checked_output,
    read_drops,
    read_number,
    read_reasons,
    read_segments,
)
from rlcli.errors import UsageError
from rlcli.messaging.messages import Fields
from rlcli.observe.responses import Moments, scores_of

NO_OUTPUT: Fields = {
    "batch": None,
    "stats": {},
    "scores": {},
    "counts": {},
    "dropped": {},
    "reasons": {},
    "segments": {},
}
"""Empty reports for what calls of other kinds report: a description of its outputs, its statistics,
moments of the scores in its outputs and of the numbers that it counted, the samples that it drops,
each with the reason, why responses have their rewards, and the segments of responses."""


def accept_output(
    mfc: MFCDef,
    data: SequenceSample,
    returned: Any,
    origin: Origin,
    device: torch.device,
    evaluates: bool,
) -> tuple[SequenceSample, Fields]:
    """What a call returned for `data`, with the graph's names for its keys, and what is reported of
    it to the master. Raises UsageError if it is not usable."""
    output, counts, dropped = read_output(mfc, data, returned, origin, device)
    names = output_names(mfc)
    if missing := [key for key in names if key not in output.keys]:
        component = mfc.interface_impl.type_
        raise UsageError(
            f"{component} did not produce {', '.join(missing)}, which call {mfc.name} promises",
            hint="correct the WRITES of its class, or the call's outputs",
            code="R71",
        )
    reported = {
        "reasons": read_reasons(output, origin),
        "segments": read_segments(output, origin),
    }
    sums, output.metadata = read_sums(output.metadata), {}
    output.remap_keys_(names)
    moments = _moments(_played(output, dropped), names, evaluates)
    return output, {
        "batch": output.meta().as_json(),
        "scores": moments | sums,
        "counts": counts,
        "dropped": dropped,
        **reported,
    }


def output_names(mfc: MFCDef) -> dict[str, str]:
    """The keys that a call writes: the interface's name → the graph's name."""
    return {key: mfc.output_key_remap.get(key, key) for key in mfc.output_keys}


def read_output(
    mfc: MFCDef, data: SequenceSample, returned: Any, origin: Origin, device: torch.device
) -> tuple[SequenceSample, dict[str, Moments], dict[str, str]]:
    """What a call returned for `data`, if it is usable; the numbers that it counted; and the
    samples that it drops. The output's metadata is what the call added."""
    output = checked_output(returned, data, output_names(mfc), origin, device)
    output.metadata = {
        name: values for name, values in output.metadata.items() if name not in data.metadata
    }
    return output, read_counts(output.metadata, origin), read_drops(output, mfc.drops, origin)


def read_counts(metadata: Mapping[str, Sequence[Any]], origin: Origin) -> dict[str, Moments]:
    """The numbers that a call attaches to its samples, such as errors of a reward."""
    counts: dict[str, Moments] = {}
    for name, values in metadata.items():
        if values and all(type(value) in (int, float) for value in values):
            numbers = [read_number(value, f"counted {name}", origin) for value in values]
            counts[name] = Moments.of(numbers)
    return counts


def read_sums(metadata: Mapping[str, Sequence[Any]]) -> dict[str, Moments]:
    """The numbers that a call attaches to its samples as (sum, count),
    of their sequences or tokens."""
    sums: dict[str, Moments] = {}
    for name, values in metadata.items():
        if values and all(map(_is_sum, values)):
            sums[name] = sum(itertools.starmap(Moments.of_sum, values), Moments())
    return sums


def measured_by(engine: Any) -> dict[str, Moments]:
    """What an engine reports about the responses that it has just given."""
    measured: dict[str, tuple[float, int]] = getattr(engine, "measured", dict)()
    return {name: Moments.of_sum(*sum_and_count) for name, sum_and_count in measured.items()}


def _is_sum(value: Any) -> bool:
    return type(value) is tuple and [type(number) for number in value] == [float, int]


def _moments(
    output: SequenceSample, names: Mapping[str, str], evaluates: bool
) -> dict[str, Moments]:
    """The scores in a call's outputs, as `scores_of`."""
    scores = scores_of(output, names, evaluates=evaluates)
    return {name: Moments.of(numbers) for name, numbers in scores.items()}


def _played(output: SequenceSample, dropped: Mapping[str, str]) -> SequenceSample:
    """The samples whose environments have not failed: the others have no scores."""
    rows = [row for row, id_ in enumerate(output.ids) if dropped.get(str(id_)) != UNPLAYED]
    return output if len(rows) == output.bs else output.select_indices(rows)
