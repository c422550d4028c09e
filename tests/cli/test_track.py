"""`rlcli track`: which trackers a run is sent to."""

from __future__ import annotations

import json

from recorded_runs import record_run

from rlcli.recipe.resolve import load_recipe


def test_a_run_is_sent_to_the_trackers_of_its_recipe_wherever_its_rows_are(
    rlcli, tmp_path, monkeypatch
):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    run = record_run(tmp_path / "run")
    resolved = load_recipe(
        "sft", ["models.actor.path=owner/name", "datasets.train.args.path=rows.jsonl"]
    )
    (run / "recipe.resolved.yaml").write_text(resolved.to_yaml())
    (tmp_path / "rows.jsonl").unlink()
    code, out, err = rlcli("track", str(run), "--json")
    assert code == 0, err
    assert [sent["tracker"] for sent in json.loads(out)["trackers"]] == ["tensorboard"]
