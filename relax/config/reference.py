"""Writes docs/configuration.md from the models: `python -m relax.config.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax.config.base import StrictModel
from relax.config.run import RunConfig
from relax.config.sections import ROLES

HEAD = """# Configuration reference

Generated from the models in `relax/config`: do not edit. One run is one Serve YAML; each application's `args`
are the shared `run` (by a YAML anchor) and the role's own section. `relax check FILE` validates it, and
`--set section.key=value` overrides a value.
"""


def reference() -> str:
    lines = [HEAD]
    for path, model in _sections():
        doc = (model.__doc__ or "").strip().splitlines()[0]
        lines += [f"\n## `{path}`\n", f"{doc}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            meaning = (field.description or "").replace("\n", " ").replace("|", "\\|").strip()
            lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, type[StrictModel]]]:
    seen: set[type[StrictModel]] = set()
    yield from _walk("run", RunConfig, seen)
    for role in ROLES.values():
        yield from _walk(role.name, typing.cast(type[StrictModel], role.args.model_fields[role.name].annotation), seen)


def _walk(path: str, model: type[StrictModel], seen: set[type[StrictModel]]) -> Iterator[tuple[str, type[StrictModel]]]:
    if model in seen:
        return
    seen.add(model)
    yield path, model
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield from _walk(f"{path}.{name}", inner, seen)


def _models(annotation: Any) -> list[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(item, name) and getattr(item, name) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _name(arg) for arg in typing.get_args(annotation))
    if origin is tuple:
        return "list of " + _name(typing.get_args(annotation)[0])
    if origin is dict:
        return "mapping"
    if origin is typing.Annotated:
        return _name(typing.get_args(annotation)[0])
    if hasattr(annotation, "__members__"):
        return " \\| ".join(f"`{member.value}`" for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    if isinstance(value, StrictModel):
        return "see below"
    if value is PydanticUndefined or value is None:
        return "null"
    return f"`{json.dumps(value, default=str)}`"


if __name__ == "__main__":
    print(reference(), end="")
