"""Every configuration key is read by some code."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from relax.config.base import StrictModel
from relax.config.run import RunConfig
from relax.config.sections import ROLES

ROOT = Path(__file__).parents[2]


def models(model: type[StrictModel]) -> set[type[StrictModel]]:
    found: set[type[StrictModel]] = set()
    stack: list[Any] = [model]
    while stack:
        annotation = stack.pop()
        if isinstance(annotation, type) and issubclass(annotation, StrictModel) and annotation not in found:
            found.add(annotation)
            stack += [field.annotation for field in annotation.model_fields.values()]
        stack += typing.get_args(annotation)
    return found


def test_every_key_is_read_outside_the_configuration_package() -> None:
    """behaviour: B40"""
    sources = [
        path.read_text()
        for package in ("relax", "services", "bus")
        for path in (ROOT / package).rglob("*.py")
        if "relax/config" not in path.as_posix()
    ]
    # Properties and cross-checks of the models themselves count: they are what others then read.
    sources += [(ROOT / "relax" / "config" / name).read_text() for name in ("run.py", "file.py")]
    text = "\n".join(sources)
    read = set(re.findall(r"\.([a-z_][a-z0-9_]*)\b", text)) | set(re.findall(r"""\[["']([a-z_0-9]+)["']\]""", text))
    sections = {RunConfig} | {role.args.model_fields[role.name].annotation for role in ROLES.values()}
    keys = {
        f"{model.__name__}.{name}"
        for section in sections
        for model in models(typing.cast(type[StrictModel], section))
        for name in model.model_fields
    }
    assert sorted(key for key in keys if key.rpartition(".")[2] not in read) == []
