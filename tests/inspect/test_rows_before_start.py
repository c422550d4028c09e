"""`rlcli train` checks some rows of each dataset before anything is started."""

from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.errors import ResourceError, RlcliError
from rlcli.inspect.before_start import check_before_start
from rlcli.recipe.resolve import load_recipe


def raising(error):
    def do(*_):
        raise error

    return do


@pytest.fixture
def unanswered(tmp_path, monkeypatch):
    """An override that gives ppo_math rows that math_reward cannot judge."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(64 * '{"prompt": "1+1="}\n')
    return "datasets.train={type: prompt_only, args: {path: rows.jsonl}}"


def test_rows_that_no_reward_can_judge_are_refused(unanswered):
    resolved = load_recipe("ppo_math", [unanswered])
    with pytest.raises(RlcliError, match="50 of 50 checked rows have no answer") as error:
        check_before_start(resolved, None, [], warn=print)
    assert (error.value.exit_code, error.value.code) == (4, "F31")
    assert str(error.value.hint).endswith("--no-check trains anyway")
    check_before_start(resolved, None, [])


def test_train_checks_rows_unless_disabled(unanswered, monkeypatch, capsys):
    monkeypatch.setattr("rlcli.launch.run.with_warm_starts", raising(ResourceError("it has begun")))
    for options, code in (([], 4), (["--no-check"], 6)):
        with pytest.raises(SystemExit) as ended:
            main(["train", "ppo_math", unanswered, "--no-supervisor", *options])
        assert ended.value.code == code
    assert "reward_inf reward: 50 of 50 checked rows" in capsys.readouterr().err
    assert not Path("runs").exists()
