"""The picture of a topology: one device, a machine, many machines, roles on separate devices."""

from __future__ import annotations

import pytest

from rlcli.recipe.resolve import load_recipe
from rlcli.topology.drawing import draw, ranks_text
from rlcli.topology.report import make_plan


def picture(*overrides: str, nodes: int = 1, devices: int = 1) -> list[str]:
    plan = make_plan(load_recipe("ppo_math", overrides), nodes=nodes, devices=devices)
    return draw(plan.recipe, plan.topology)


def test_one_device_is_drawn():
    assert picture() == [
        "        node 0",
        "        rank 0",
        "actor   ■        dp1  fsdp  generate+train",
        "critic  ■        dp1  fsdp  train",
        "ref     □        dp1  inference",
        "reward  ○",
        "        ■ trained   □ only read   ○ no weights",
    ]


def test_roles_on_different_devices_of_two_nodes_are_drawn():
    apart = ["models.critic.devices='0'", "models.ref.devices='0'"]
    lines = picture("graph.ref_inf.hooks.offload=true", *apart, nodes=2, devices=8)
    assert lines == [
        "        node 0      node 1",
        "        ranks 0-7   ranks 8-15",
        "actor   ■■■■■■■■    ■■■■■■■■     dp16  fsdp  generate+train",
        "critic  ■·······    ········     dp1   fsdp  train",
        "ref     □·······    ········     dp1   inference  offload",
        "reward  ○○○○○○○○    ○○○○○○○○",
        "        ■ trained   □ only read   ○ no weights   · absent",
    ]


def test_identical_nodes_are_one_column():
    lines = picture(nodes=16, devices=8)
    assert lines[:3] == [
        "        nodes 0-15",
        "        ranks 0-127",
        "actor   ■■■■■■■■      dp128  fsdp  generate+train",
    ]
    assert len(lines) == 7


def test_many_devices_are_shown_as_a_count():
    assert "64 x ■" in picture(devices=64)[2]


@pytest.mark.parametrize(
    ("nodes", "devices"), [(1, 1), (1, 8), (2, 8), (5, 16), (16, 8), (256, 16), (3, 100)]
)
@pytest.mark.parametrize("apart", [False, True])
def test_the_drawing_fits_80_columns_and_shows_every_role_and_rank(nodes, devices, apart):
    lines = picture(*(["models.critic.devices='0'"] if apart else []), nodes=nodes, devices=devices)
    assert all(len(line) <= 80 for line in lines)
    assert {line.split()[0] for line in lines if line[:1].strip()} == {
        "actor",
        "critic",
        "ref",
        "reward",
    }
    if devices <= 16 and not apart:
        assert sum(line.count("■") for line in lines if line.startswith("actor")) == devices


def test_ranks_are_abbreviated_as_ranges():
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
