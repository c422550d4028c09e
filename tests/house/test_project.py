"""Where components are searched: roots, the user's project, and the guard against packages."""

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


def test_the_nearest_marked_parent_folder_is_the_project(tmp_path, monkeypatch):
    outer = make_project(tmp_path / "outer")
    make_project(outer / "inner", "[project]\nname = 'rlcli-lookalike'\n")  # without our table
    below = outer / "inner" / "deep"
    below.mkdir()
    monkeypatch.chdir(below)
    assert project.current_project() == outer
    assert project.roots()[-1] == outer


def test_without_a_project_only_rlcli_is_searched(tmp_path):
    assert project.find_project(tmp_path) is None
    assert project.roots()[0] == project.PACKAGE
    assert tmp_path.resolve() not in project.roots()


def test_the_variable_takes_precedence_over_the_working_directory(tmp_path, monkeypatch):
    here, named = make_project(tmp_path / "here"), make_project(tmp_path / "named")
    monkeypatch.chdir(here)
    monkeypatch.setenv("RLCLI_PROJECT", str(named))
    assert project.current_project() == named
    assert here not in project.roots()


def test_use_project_sets_the_project_of_child_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", "")  # so that monkeypatch restores it
    named = make_project(tmp_path / "named")
    project.use_project(tmp_path / "named")
    assert project.current_project() == named


@pytest.mark.parametrize(
    ("text", "message"), [(None, "not a folder"), ("[project]\n", "does not mark it")]
)
def test_a_named_folder_that_is_not_a_project_is_an_error(tmp_path, monkeypatch, text, message):
    if text is not None:
        make_project(tmp_path / "named", text)
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path / "named"))
    with pytest.raises(ProjectError, match=message):
        project.roots()


def test_an_invalid_pyproject_is_named(tmp_path):
    make_project(tmp_path, "[tool.rlcli\n")
    with pytest.raises(ProjectError) as caught:
        project.roots()
    assert caught.value.where == str(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("kind", project.FOLDERS)
def test_an_init_file_in_a_component_folder_is_refused(tmp_path, kind):
    init = make_project(tmp_path) / kind / "__init__.py"
    init.parent.mkdir()
    assert project.roots()
    init.touch()
    with pytest.raises(ProjectError) as caught:
        project.roots()
    assert caught.value.where == str(init)


def test_an_init_file_in_a_subfolder_of_components_is_refused(tmp_path):
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


def test_the_search_path_lists_existing_folders_in_order(tmp_path):
    root = make_project(tmp_path)
    assert str(root / "backends") not in project.search_path("backends")
    (root / "backends").mkdir()
    path = project.search_path("backends")
    assert path[0] == str(project.PACKAGE / "backends")
    assert path[-1] == str(root / "backends")
    assert not project.is_built_in(root / "backends" / "mine.py")
    assert project.is_built_in(project.PACKAGE / "backends" / "fsdp.py")


@pytest.mark.parametrize(
    ("mode", "owner", "trusted"), [(0o1777, 12345, False), (0o755, 12345, True), (0o1777, 0, True)]
)
def test_a_project_of_another_user_in_a_shared_folder_must_be_named(
    tmp_path, monkeypatch, mode, owner, trusted
):
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


def test_files_below_a_folder_of_another_user_are_planted(tmp_path, monkeypatch):
    """As in /tmp/stranger/project, where anybody may create a folder in /tmp."""
    deep = make_project(tmp_path / "everybody" / "stranger" / "project")
    shared = tmp_path.resolve() / "everybody"
    shared.chmod(0o1777)
    monkeypatch.setattr(
        project, "_owner", lambda file: 12345 if file.is_relative_to(shared / "stranger") else 0
    )
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


def test_a_folder_of_the_user_in_a_shared_folder_is_not_planted(tmp_path):
    mine = make_project(tmp_path / "everybody" / "mine")
    (tmp_path / "everybody").chmod(0o1777)
    assert project.planted(mine / "pyproject.toml") is None
