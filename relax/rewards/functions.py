"""The built-in reward functions, each `f(response, label, metadata, **params) -> float`.

They run inside a worker process, so they set no time limits of their own. An answer that cannot be
read is a wrong answer (0); a label that cannot be read is a failed scoring and raises.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax.plugins import load_function
from relax.rewards.base import RewardConfigError, RewardFunctionError
from relax.types import Json

RewardFunction = Callable[..., Any]
"""Returns anything: `compose` judges whether it is a usable number."""

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_ANSWER_PHRASE = re.compile(r"(?:answer\s*(?:is|:|=)|####)\s*:?\s*", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def exact(response: str, label: Json, metadata: Mapping[str, Json]) -> float:
    """1 when response and label are equal after stripping white space, else 0."""
    return float(response.strip() == _text_label(label))


def overlap(response: str, label: Json, metadata: Mapping[str, Json]) -> float:
    """Share of positions with the right character, over the longer of response and label; both stripped.

    Two empty strings agree: 1.
    """
    answer, gold = response.strip(), _text_label(label)
    longer = max(len(answer), len(gold))
    if longer == 0:
        return 1.0
    return sum(a == g for a, g in zip(answer, gold, strict=False)) / longer


def math(response: str, label: Json, metadata: Mapping[str, Json]) -> float:
    r"""1 when the answer in the response is mathematically equal to the label (math-verify), else 0.

    The answer is, in this order: the last `\boxed{...}`; what follows the last "answer is", "answer:" or
    "####" (its first formula, else its first number); the last `$...$`, `\(...\)` or `\[...\]` formula;
    the last plain number. The label is read in the same way, and as one formula when that finds nothing.

    Raises:
        RewardFunctionError: no label, or one that math-verify cannot parse.
    """
    gold = _parse_gold(_text_label(label))
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    parse, verify = _math_verify()
    parsed = parse(_as_formula(answer))
    return float(bool(parsed) and verify(gold, parsed))


def format_match(response: str, label: Json, metadata: Mapping[str, Json], *, pattern: str) -> float:
    """1 when the whole response matches the regular expression (a dot matches line ends too), else 0."""
    return float(re.fullmatch(pattern, response, flags=re.DOTALL) is not None)


def gym(response: str, label: Json, metadata: Mapping[str, Json], *, answer_tag: str | None = None) -> float:
    """The scorer of the reasoning-gym task that the prompt came from, in [0, 1].

    `metadata` is the metadata of the gym's entry (it names the task in `source_dataset`) with the entry's
    answer as label, or a whole entry (question, answer, metadata). With `answer_tag` the text in the last
    `<tag>...</tag>` is scored, and a response without one gets 0.

    Raises:
        RewardFunctionError: the metadata names no task.
    """
    inner = metadata.get("metadata")
    if isinstance(inner, Mapping) and "source_dataset" in inner:
        entry = dict(metadata)
    elif "source_dataset" in metadata:
        entry = {"question": metadata.get("question", ""), "answer": label, "metadata": dict(metadata)}
    else:
        raise RewardFunctionError("gym needs metadata.source_dataset: the name of the reasoning-gym task")
    answer: str | None = response.strip()
    if answer_tag is not None:
        found = re.findall(f"<{answer_tag}>(.*?)</{answer_tag}>", response, flags=re.DOTALL)
        answer = found[-1].strip() if found else None
    if answer is None:
        return 0.0
    return float(_gym_scorer(entry["metadata"]["source_dataset"])(answer, entry))


BUILTIN: Mapping[str, RewardFunction] = {
    "exact": exact,
    "overlap": overlap,
    "math": math,
    "format": format_match,
    "gym": gym,
}


def resolve(name: str, params: Mapping[str, Any], base: Path) -> RewardFunction:
    """The function of a part: a built-in name, or `module:function` / `file.py:function` relative to `base`.

    The result takes (response, label, metadata, prompt); `params` are bound, and `prompt` is passed on only
    to a function that has a parameter of that name.

    Raises:
        RewardConfigError: unknown name, or `params` that do not fit the signature.
        PluginError: the file or module of an own function does not load or does not have it.
    """
    function = BUILTIN.get(name)
    if function is None:
        function = _load_own(name, base)
    signature = inspect.signature(function)
    wants_prompt = "prompt" in signature.parameters and "prompt" not in params
    try:
        signature.bind("", None, {}, **params, **({"prompt": {}} if wants_prompt else {}))
    except TypeError as error:
        raise RewardConfigError(f"reward part {name!r}: {error}; its signature is {name}{signature}") from error
    if name in {"math", "gym"}:
        # The imports take up to seconds: they belong to the start of a worker, not to its first call.
        _math_verify() if name == "math" else _gym_scorer(None)

    def bound(response: str, label: Json, metadata: Mapping[str, Json], prompt: Mapping[str, Json]) -> Any:
        extra = {"prompt": prompt} if wants_prompt else {}
        return function(response, label, metadata, **params, **extra)

    return bound


def extract_answer(text: str) -> str | None:
    """The answer that `math` reads from a text; see there for the order. None when there is none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    phrases = list(_ANSWER_PHRASE.finditer(text))
    if phrases:
        tail = text[phrases[-1].end() :]
        found = _formulas(tail)[:1] or _NUMBER.findall(tail)[:1]
        if found:
            return str(found[0])
    found = _formulas(text) or _NUMBER.findall(text)
    return str(found[-1]) if found else None


def _text_label(label: Json) -> str:
    if label is None:
        raise RewardFunctionError("the sample has no label to compare with")
    return str(label).strip()


def _formulas(text: str) -> list[str]:
    return ["".join(groups) for groups in _FORMULA.findall(text)]


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def _as_formula(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else f"${text}$"


@functools.lru_cache(maxsize=4096)
def _parse_gold(label: str) -> Any:
    parse, _ = _math_verify()
    for candidate in (extract_answer(label), label):
        parsed = parse(_as_formula(candidate)) if candidate else []
        if parsed:
            return parsed
    raise RewardFunctionError(f"math-verify cannot parse the label {label!r}")


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    from math_verify import parse, verify

    # The limit of the pool replaces the alarms of math-verify, which a loop in C outlives; it warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return (
        functools.partial(parse, fallback_mode="no_fallback", parsing_timeout=None),
        functools.partial(verify, timeout_seconds=None),
    )


@functools.lru_cache(maxsize=256)
def _gym_scorer(task: str | None) -> Callable[[str, dict[str, Json]], float]:
    import reasoning_gym

    if task is None:
        return lambda answer, entry: 0.0
    try:
        scorer: Callable[[str, dict[str, Json]], float] = reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise RewardFunctionError(f"reasoning-gym has no task {task!r}") from error
    return scorer


def _load_own(name: str, base: Path) -> RewardFunction:
    if ":" not in name:
        known = ", ".join(BUILTIN)
        raise RewardConfigError(
            f"unknown reward part {name!r}: use one of {known}, or module:function or file.py:function"
        )
    return load_function(name, base)
