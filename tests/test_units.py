"""Human-readable numbers."""

import pytest

from rlcli.topology.text_format import size as size_in_plan
from rlcli.units import count, grouped_count, size


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (512, "512 bytes"),
        (1 << 10, "1 KiB"),
        (1_023_000, "999 KiB"),
        (1_023_590, "1000 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (3_972_844_748, "3.7 GiB"),
    ],
)
def test_a_size_has_three_digits_or_is_a_whole_number(number, text):
    assert size(number) == text


def test_sizes_of_a_plan_are_written_alike():
    assert size_in_plan(1_073_217_536) == "1024 MiB"
    assert size_in_plan((1 << 30) * 4095 // 4096) == "1024 MiB"
    assert size_in_plan((1 << 20) * 9996 // 10) == "1000 MiB"
    assert size_in_plan(1 << 19) == "0.5 MiB"
    assert size_in_plan(None) == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(1, "file"), "1 file"),
        (count(0, "file"), "0 files"),
        (count(2, "process", "es"), "2 processes"),
        (grouped_count(1, "row"), "1 row"),
        (grouped_count(12_340, "row"), "12 340 rows"),
    ],
)
def test_a_noun_agrees_with_its_number(text, expected):
    assert text == expected
