"""Which runs a sweep has."""

import pytest

from rlcli.errors import UsageError
from rlcli.observe.run_directory import NAME
from rlcli.recipe.sweep import MOST_RUNS, sweep_runs


def test_a_sweep_runs_every_combination_with_every_seed():
    runs = sweep_runs(["ppo.kl_ctl=0.01,0.1", "train.steps=5"], 2, 7)
    assert [run.settings for run in runs] == [
        ("ppo.kl_ctl=0.01", "train.steps=5", "seed=7"),
        ("ppo.kl_ctl=0.01", "train.steps=5", "seed=8"),
        ("ppo.kl_ctl=0.1", "train.steps=5", "seed=7"),
        ("ppo.kl_ctl=0.1", "train.steps=5", "seed=8"),
    ]
    assert [run.name for run in runs][:2] == [
        "1-kl_ctl-0.01-steps-5-seed-7",
        "2-kl_ctl-0.01-steps-5-seed-8",
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("k={a: [1,2], b: 3},{}", ["{a: [1,2], b: 3}", "{}"]),
        ("k='a,b',\"c]\",d", ["'a,b'", '"c]"', "d"]),
        ("k=a=b,c", ["a=b", "c"]),
        ("k= 1 , 2 ", ["1", "2"]),
    ],
)
def test_a_value_may_hold_commas(text, values):
    assert [run.settings for run in sweep_runs([text], None, 1)] == [
        (f"k={value}",) for value in values
    ]


def test_names_of_runs_are_valid_folder_names_for_any_values():
    values = ",".join([*("../../x/" * n + "é$(rm)" for n in range(1, 12)), "x" * 300])
    runs = sweep_runs([f"k={values}"], None, 1)
    assert all(NAME.fullmatch(run.name) and not run.name.endswith(".") for run in runs)
    assert len({run.name for run in runs}) == 12


@pytest.mark.parametrize(
    ("swept", "seeds"),
    [
        (["k"], None),
        (["=1"], None),
        (["k="], None),
        (["k=1,"], None),
        (["k=1,1"], None),
        (["k=1", "k=2"], None),
        (["seed=1"], 2),
        ([f"k={','.join(map(str, range(MOST_RUNS)))}"], 2),
    ],
)
def test_invalid_sweeps_are_refused(swept, seeds):
    with pytest.raises(UsageError):
        sweep_runs(swept, seeds, 1)
