"""`rlcli schema`: JSON on stdout, and --install, which does not overwrite files of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCHEMA, SETTINGS = Path(".rlcli/recipe.schema.json"), Path(".vscode/settings.json")


def test_schema_prints_json_schema(rlcli):
    code, out, err = rlcli("schema")
    assert (code, err) == (0, "")
    assert json.loads(out)["$schema"].endswith("2020-12/schema")
    assert rlcli("schema", "--json")[1] == out
    assert "kl_ctl" in json.loads(rlcli("schema", "gae")[1])["properties"]


def test_install_writes_only_changed_files(rlcli):
    code, out, _ = rlcli("schema", "--install", "--dry-run")
    assert code == 0
    assert "would write" in out
    assert "yaml.schemas" in out
    assert not SCHEMA.exists()
    assert not SETTINGS.exists()
    assert rlcli("schema", "--install")[0] == 0
    assert json.loads(SCHEMA.read_text()) == json.loads(rlcli("schema")[1])
    assert list(json.loads(SETTINGS.read_text())["yaml.schemas"]) == [f"./{SCHEMA}"]
    document = json.loads(rlcli("schema", "--install", "--json")[1])
    assert [file["state"] for file in document["files"]] == ["unchanged", "unchanged"]


def test_install_writes_into_the_project_and_updates_the_schema(rlcli, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert rlcli("schema", "--install")[0] == 0
    assert (tmp_path / SCHEMA).exists()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.yaml").write_text(
        "own: {lr: 1}\nmodels: {actor: {backend: {type: fsdp, args: '${own}'}}}\n"
    )
    document = json.loads(rlcli("schema", "--install", "--json")[1])
    assert [file["state"] for file in document["files"]] == ["changed", "unchanged"]
    assert "own" in json.loads((tmp_path / SCHEMA).read_text())["properties"]


def test_a_file_not_written_by_rlcli_is_kept(rlcli):
    SCHEMA.parent.mkdir()
    SCHEMA.write_text("{}")
    code, out, err = rlcli("schema", "--install")
    assert (code, out) == (2, "")
    assert "not written by rlcli" in err
    assert SCHEMA.read_text() == "{}"
    assert not SETTINGS.exists()


def test_unreadable_settings_are_kept_and_the_entry_is_shown(rlcli):
    SETTINGS.parent.mkdir()
    SETTINGS.write_text("{ broken")
    code, out, _ = rlcli("schema", "--install")
    assert code == 0
    assert SETTINGS.read_text() == "{ broken"
    assert "left alone" in out
    assert '{"yaml.schemas": {"./.rlcli/recipe.schema.json"' in out


def test_a_link_out_of_the_project_is_not_followed(rlcli, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    SCHEMA.parent.symlink_to(elsewhere)
    code, _, err = rlcli("schema", "--install")
    assert code == 2
    assert err.startswith("error[S7]")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--install"], ["--dry-run"]])
def test_mistakes_exit_2(rlcli, arguments):
    code, out, err = rlcli("schema", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[")
