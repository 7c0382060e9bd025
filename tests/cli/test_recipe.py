from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax.cli.main import app
from relax.config.file import load_run_file


def test_a_new_recipe_passes_the_check_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["recipe", "new", "my_task"])
    assert made.exit_code == 0, made.output
    folder = tmp_path / "recipes" / "my_task"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.yaml",
        "data.py",
        "rewards.py",
        "worker.py",
    }
    assert "$" not in "".join(path.read_text() for path in folder.iterdir())
    checked = CliRunner().invoke(app, ["check", "recipes/my_task/config.yaml"])
    assert checked.exit_code == 0, checked.output
    assert load_run_file(folder / "config.yaml").run.name == "my_task"


@pytest.mark.parametrize(("name", "words"), [("a/b", "cannot name a recipe"), ("taken", "exists already")])
def test_a_recipe_that_cannot_be_written_says_why(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "taken").mkdir(parents=True)
    made = CliRunner().invoke(app, ["recipe", "new", name])
    assert made.exit_code == 1 and words in made.output


@pytest.mark.parametrize("recipe", ["calculator", "ranks"])
def test_the_recipes_of_the_project_pass_the_check(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    checked = CliRunner().invoke(app, ["check", f"recipes/{recipe}/config.yaml"])
    assert checked.exit_code == 0, checked.output
