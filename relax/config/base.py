"""Strict base for every configuration model: unknown keys fail and name the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    """Refuses unknown keys, naming the nearest known key (B40). Immutable once built."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = set(cls.model_fields)
        for key in data:
            if key in known:
                continue
            raise ValueError(f"unknown key '{key}' in {cls.__name__}{nearest(str(key), known)}")
        return data


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, else all of them."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean '{near[0]}'?" if near else f" (known: {', '.join(sorted(known))})"
