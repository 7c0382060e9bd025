"""Prompts from the reasoning-gym package: any of its tasks by name.

Row i is a function of (seed, i). With reasoning-gym 0.1.25 four tasks also depend on PYTHONHASHSEED
(isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note): set it for the whole run
when their prompts must be equal after a restart.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

from relax.data.rows import Row, digest_of, stable_seed, with_system
from relax.data.toy import is_held_out
from relax.types import DataError, Json

STRIDE = 1 << 20
"""Far enough apart for any size in use, and small enough that no seed leaves 32 bits."""

MOST_DRAWS = 200
"""With an eighth held out, the chance that 200 different questions are all on the other side is 3e-12."""

METADATA_KEY = "reasoning_gym"
"""Key in a prompt's metadata that holds what `score_answer` needs."""


class GymRows:
    """Rows of one reasoning-gym task; entries are generated when they are asked for.

    With `chat` the question is a user message, else it is text. `label` is the entry's answer (null
    for the few tasks that only their scorer can judge); metadata carries the whole entry.

    reasoning-gym seeds entry i with `seed + i`, so neighbouring seeds would share entries. The seed
    is spread over 2^31 first: then the entries of two seeds are disjoint draws.

    An eighth of all questions, chosen by digest, is held out: training rows never ask them, whatever the
    seeds, and with `held_out` rows ask nothing else. Position i takes the first of the entries i, i + STRIDE,
    i + 2 x STRIDE, ... on its side. A task whose questions are so few that none of the first 200 is there
    (`MOST_DRAWS`) cannot be split: it asks entry i.
    """

    checked = False

    def __init__(
        self,
        task: str,
        params: Mapping[str, Any],
        size: int,
        seed: int,
        *,
        chat: bool,
        system_prompt: str | None = None,
        held_out: bool = False,
    ) -> None:
        self.name = task
        self._held_out = held_out
        self._params = dict(params)
        self._size = size
        self._seed = stable_seed(seed)
        self._chat = chat
        self._system_prompt = system_prompt
        spread = int(np.random.SeedSequence(self._seed).generate_state(1, np.uint32)[0]) >> 1
        self._dataset = _create(task, {**self._params, "seed": spread, "size": STRIDE * MOST_DRAWS})

    def __len__(self) -> int:
        return self._size

    def row(self, position: int) -> Row:
        entry = self._entry(position)
        question = str(entry["question"])
        messages: tuple[dict[str, str], ...] | None = ({"role": "user", "content": question},)
        messages, text = with_system(self._system_prompt, messages if self._chat else None, question)
        metadata = {METADATA_KEY: {"task": self.name, "params": self._params, "entry": pack(entry)}}
        return Row(
            position,
            f"reasoning-gym task '{self.name}', prompt {position}",
            messages,
            None if messages else text,
            json.loads(json.dumps(entry["answer"])),
            metadata,
        )

    def _entry(self, position: int) -> dict[str, Any]:
        for draw in range(MOST_DRAWS):
            entry: dict[str, Any] = self._dataset[position + draw * STRIDE]
            if is_held_out(str(entry["question"])) == self._held_out:
                return entry
        first: dict[str, Any] = self._dataset[position]
        return first

    def identity(self) -> dict[str, Json]:
        return {
            "kind": "reasoning_gym",
            "package": version("reasoning-gym"),
            "task": self.name,
            "params": digest_of(self._params),
            "size": self._size,
            "seed": self._seed,
            "chat": self._chat,
            "system_prompt": self._system_prompt,
            "held_out": self._held_out,
        }


def score_answer(metadata: Mapping[str, Json], answer: str) -> float:
    """Score in [0, 1] by the task's own scorer. `metadata` is a prompt's, `answer` the extracted answer.

    Raises `DataError` when the prompt did not come from reasoning-gym.
    """
    facts = metadata.get(METADATA_KEY)
    if not isinstance(facts, dict):
        raise DataError(f"the prompt has no '{METADATA_KEY}' metadata: it does not come from a reasoning-gym source")
    dataset = _scorer(facts["task"], json.dumps(facts["params"], sort_keys=True))
    return float(dataset.score_answer(answer, unpack(facts["entry"])))


@functools.lru_cache(maxsize=32)
def _scorer(task: str, params: str) -> Any:
    return _create(task, {**json.loads(params), "seed": 0, "size": 1})


def _create(task: str, params: dict[str, Any]) -> Any:
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        raise DataError(
            f"unknown reasoning-gym task '{task}' in data.task"
            + (f": did you mean '{near[0]}'?" if near else f"; the package has {len(DATASETS)} tasks")
        )
    try:
        return reasoning_gym.create_dataset(task, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.params of the reasoning-gym task '{task}': {error}") from error


def pack(value: Any) -> Json:
    """An entry as JSON that `unpack` turns back exactly: scorers compare tuples, which JSON does not have."""
    if isinstance(value, tuple):
        return {"__tuple__": [pack(v) for v in value]}
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: pack(v) for k, v in value.items()}
        return {"__items__": [[pack(k), pack(v)] for k, v in value.items()]}
    return value


def unpack(value: Json) -> Any:
    """Inverse of `pack`, after any JSON round trip."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "__tuple__" in value:
        return tuple(unpack(v) for v in value["__tuple__"])
    if "__items__" in value:
        return {unpack(k): unpack(v) for k, v in value["__items__"]}
    return {k: unpack(v) for k, v in value.items()}
