"""`relax recipe new`: a folder with everything that a task of one's own needs, which runs as it is."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from string import Template

from relax.types import RelaxError

TEMPLATE = "recipe_template"
"""Folder of the files, beside this one; `$name`, `$folder` and `$title` are filled in."""


class RecipeError(RelaxError, ValueError):
    """A recipe that cannot be written: says why."""


def new_recipe(name: str, parent: Path) -> Path:
    """Write `parent/name`. Its run file names the other files from the current folder.

    Raises `RecipeError` for a name that a run cannot have and a folder that exists.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
        raise RecipeError(f"'{name}' cannot name a recipe: letters, digits, - and _ only, the first a letter or digit")
    folder = parent / name
    if folder.exists():
        raise RecipeError(f"{folder} exists already: choose another name, or remove it")
    shown = os.path.relpath(folder)
    values = {"name": name, "folder": str(folder) if shown.startswith("..") else shown, "title": name.replace("_", " ")}
    folder.mkdir(parents=True)
    for source in sorted(resources.files("relax.cli").joinpath(TEMPLATE).iterdir(), key=lambda item: item.name):
        (folder / source.name.removesuffix(".txt")).write_text(Template(source.read_text()).substitute(values))
    return folder
