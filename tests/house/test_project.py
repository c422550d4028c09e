"""Where components live: roots, the user's project, and the guard against packages."""

from pathlib import Path

import pytest

from rlcli import project
from rlcli.errors import ProjectError


def make_project(folder: Path, text: str = "[tool.rlcli]\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder.resolve()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_nearest_marked_folder_upward_is_the_project(tmp_path, monkeypatch):
    outer = make_project(tmp_path / "outer")
    make_project(outer / "inner", "[project]\nname = 'rlcli-lookalike'\n")  # no table of ours
    below = outer / "inner" / "deep"
    below.mkdir()
    monkeypatch.chdir(below)
    assert project.current_project() == outer
    assert project.roots()[-1] == outer


def test_without_a_project_only_rlcli_itself_is_searched(tmp_path):
    assert project.find_project(tmp_path) is None
    assert project.roots()[0] == project.PACKAGE
    assert tmp_path.resolve() not in project.roots()


def test_the_variable_wins_over_the_working_directory(tmp_path, monkeypatch):
    here, named = make_project(tmp_path / "here"), make_project(tmp_path / "named")
    monkeypatch.chdir(here)
    monkeypatch.setenv("RLCLI_PROJECT", str(named))
    assert project.current_project() == named
    assert here not in project.roots()


def test_use_project_tells_child_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", "")  # so that monkeypatch restores it
    named = make_project(tmp_path / "named")
    project.use_project(tmp_path / "named")
    assert project.current_project() == named


@pytest.mark.parametrize(("text", "what"), [(None, "not a folder"), ("[project]\n", "does not mark it")])
def test_a_named_project_that_is_none_is_an_error(tmp_path, monkeypatch, text, what):
    if text is not None:
        make_project(tmp_path / "named", text)
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path / "named"))
    with pytest.raises(ProjectError, match=what):
        project.roots()


def test_a_broken_pyproject_of_ours_is_named(tmp_path):
    make_project(tmp_path, "[tool.rlcli\n")
    with pytest.raises(ProjectError) as caught:
        project.roots()
    assert caught.value.where == str(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("kind", project.FOLDERS)
def test_an_init_file_in_a_component_folder_is_refused_by_name(tmp_path, kind):
    init = make_project(tmp_path) / kind / "__init__.py"
    init.parent.mkdir()
    assert project.roots()
    init.touch()
    with pytest.raises(ProjectError) as caught:
        project.roots()
    assert caught.value.where == str(init)


def test_a_package_does_not_hide_a_subfolder_of_components(tmp_path):
    mine = make_project(tmp_path) / "interfaces" / "rewards"
    mine.mkdir(parents=True)
    assert mine in project.component_folders("interfaces")
    (mine / "__init__.py").touch()
    with pytest.raises(ProjectError, match="interfaces/rewards/ a package") as caught:
        project.component_folders("interfaces")
    assert caught.value.where == str(mine / "__init__.py")


def test_shared_code_may_be_a_package_or_a_private_subfolder(tmp_path):
    interfaces = make_project(tmp_path) / "interfaces"
    for name in ("helpers", "_private", "mine"):
        (interfaces / name).mkdir(parents=True)
    (interfaces / "helpers" / "__init__.py").touch()
    folders = project.component_folders("interfaces")
    assert [folder for folder in folders if folder.parent == interfaces] == [interfaces / "mine"]


def test_search_path_lists_folders_that_exist_in_order(tmp_path):
    root = make_project(tmp_path)
    assert str(root / "backends") not in project.search_path("backends")
    (root / "backends").mkdir()
    found = project.search_path("backends")
    assert found[0] == str(project.PACKAGE / "backends")
    assert found[-1] == str(root / "backends")
    assert not project.is_built_in(root / "backends" / "mine.py")
    assert project.is_built_in(project.PACKAGE / "backends" / "fsdp.py")


@pytest.mark.parametrize(
    ("mode", "owner", "trusted"), [(0o1777, 12345, False), (0o755, 12345, True), (0o1777, 0, True)]
)
def test_what_others_put_into_a_folder_for_all_is_no_project_by_itself(tmp_path, monkeypatch, mode, owner, trusted):
    shared = make_project(tmp_path / "shared")
    (shared / "mine").mkdir()
    shared.chmod(mode)
    monkeypatch.setattr(project, "_owner", lambda file: owner if file.is_relative_to(shared) else 0)
    if trusted:
        assert project.find_project(shared / "mine") == shared
        return
    with pytest.raises(ProjectError, match="pyproject"):
        project.find_project(shared / "mine")
    monkeypatch.setenv("RLCLI_PROJECT", str(shared))
    assert project.current_project() == shared


def test_what_is_anywhere_below_anothers_folder_is_planted(tmp_path, monkeypatch):
    """/tmp/stranger/project: the stranger's folder lies where anybody may make one."""
    deep = make_project(tmp_path / "everybody" / "stranger" / "project")
    shared = tmp_path.resolve() / "everybody"
    shared.chmod(0o1777)
    monkeypatch.setattr(project, "_owner", lambda file: 12345 if file.is_relative_to(shared / "stranger") else 0)
    assert project.planted(deep / "pyproject.toml") == shared / "stranger"
    assert project.planted(deep / "missing") == shared / "stranger"
    with pytest.raises(ProjectError, match="rlcli --project"):
        project.find_project(deep)
    link = tmp_path / "link"
    link.symlink_to(deep)
    assert project.planted(link / "pyproject.toml") == shared / "stranger"
    shared.chmod(0o755)
    assert project.planted(deep / "pyproject.toml") is None
    assert project.find_project(deep) == deep


def test_ones_own_folder_where_anybody_may_write_is_ones_own(tmp_path):
    mine = make_project(tmp_path / "everybody" / "mine")
    (tmp_path / "everybody").chmod(0o1777)
    assert project.planted(mine / "pyproject.toml") is None
