from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax.config.data import DataConfig, DifficultyConfig
from relax.data.source import PromptSource, build_source
from relax.data.tokenizer import Tokenizer
from relax.plugins import PluginError
from relax.types import DataError


def write(path: Path, shares: list[float]) -> str:
    path.write_text(
        "\n".join(json.dumps({"prompt": f"p{i}", "metadata": {"pass_rate": s}}) for i, s in enumerate(shares))
    )
    return str(path)


def texts(source: PromptSource, count: int) -> list[str | None]:
    drawn = [source.next() for _ in range(count)]
    return [None if prompt is None else prompt.text for prompt in drawn]


def mix(weights: tuple[float, float], epochs: int | None = None, **b: Any) -> DataConfig:
    a: dict[str, Any] = {"kind": "toy", "task": "copy", "size": 40, "epochs": epochs}
    b = {"kind": "toy", "task": "sort", "size": 40, "epochs": epochs, **b}
    return DataConfig.model_validate(
        {"kind": "mix", "sources": [{"weight": weights[0], "data": a}, {"weight": weights[1], "data": b}]}
    )


def test_a_mix_draws_by_weight_and_the_same_each_time(plain: Tokenizer) -> None:
    sources = [build_source(mix((3, 1)), 5, plain, 9) for _ in range(2)]
    names = []
    for _ in range(400):
        prompts = [source.next() for source in sources]
        assert prompts[0] == prompts[1] and prompts[0] is not None
        names.append(prompts[0].source)
    assert 0.68 < names.count("copy") / 400 < 0.82
    assert names[:20] != sorted(names[:20])


def test_a_mix_ends_when_all_its_parts_have(plain: Tokenizer) -> None:
    source = build_source(mix((1, 1), epochs=1), 5, plain, 9)
    drawn = texts(source, 81)
    assert drawn[-1] is None and None not in drawn[:80]


def test_the_cursor_of_a_mix_is_exact_over_the_end_of_a_part(plain: Tokenizer) -> None:
    """behaviour: B12"""
    config = mix((5, 1), epochs=1, size=10)
    source = build_source(config, 5, plain, 9)
    for taken in range(50):
        state = json.loads(json.dumps(source.state_dict()))
        again = build_source(config, 5, plain, 9)
        again.load_state_dict(state)
        rest = build_source(config, 5, plain, 9)
        for _ in range(taken):
            rest.next()
        assert [again.next() for _ in range(51 - taken)] == [rest.next() for _ in range(51 - taken)]
        source.next()


def test_a_cursor_of_another_mix_is_refused(plain: Tokenizer) -> None:
    state = build_source(mix((1, 1)), 5, plain, 9).state_dict()
    with pytest.raises(DataError, match="belongs to mix 'mix'"):
        build_source(mix((1, 2)), 5, plain, 9).load_state_dict(state)


def test_two_parts_of_one_name_are_refused(plain: Tokenizer) -> None:
    with pytest.raises(DataError, match="two sources of the mix are named 'copy'"):
        build_source(mix((1, 1), task="copy"), 5, plain, 9)
    named = build_source(mix((1, 1), task="copy", name="other"), 5, plain, 9)
    assert {prompt.source for _ in range(20) if (prompt := named.next())} == {"copy", "other"}


def test_the_band_keeps_what_is_neither_too_hard_nor_too_easy(plain: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [0.0, 0.2, 0.5, 0.8, 0.9])
    config = DataConfig(kind="jsonl", path=path, difficulty=DifficultyConfig(low=0.2, high=0.8), epochs=1)
    source = build_source(config, 1, plain, 9)
    assert sorted(filter(None, texts(source, 4))) == ["p1", "p2", "p3"] and len(source) == 3


@pytest.mark.parametrize(
    ("order", "expected"), [("easy_first", ["p1", "p2", "p0"]), ("hard_first", ["p0", "p2", "p1"])]
)
def test_a_curriculum_orders_each_epoch(plain: Tokenizer, tmp_path: Path, order: Any, expected: list[str]) -> None:
    path = write(tmp_path / "d.jsonl", [0.1, 0.9, 0.5])
    config = DataConfig(kind="jsonl", path=path, difficulty=DifficultyConfig(order=order))
    assert texts(build_source(config, 1, plain, 9), 6) == expected * 2


def test_rows_of_one_difficulty_are_shuffled_within_it(plain: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [0.9] * 20 + [0.1] * 20)
    config = DataConfig(kind="jsonl", path=path, difficulty=DifficultyConfig(order="easy_first"))
    source = build_source(config, 1, plain, 9)
    epochs = [texts(source, 40), texts(source, 40)]
    for epoch in epochs:
        assert {int(str(text)[1:]) for text in epoch[:20]} == set(range(20))
    assert epochs[0] != epochs[1]


def test_an_empty_band_and_a_row_without_the_number_are_errors(plain: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [0.0, 1.0])
    with pytest.raises(DataError, match=r"no row has a pass_rate in \[0.2, 0.8\]; they lie in \[0, 1\]"):
        build_source(DataConfig(kind="jsonl", path=path, difficulty=DifficultyConfig(low=0.2, high=0.8)), 1, plain, 9)
    with pytest.raises(DataError, match=r"d\.jsonl:1: metadata has no share of right answers in 'solved'"):
        build_source(DataConfig(kind="jsonl", path=path, difficulty=DifficultyConfig(key="solved")), 1, plain, 9)


OWN = """
class Sums:
    def __init__(self, params, seed, held_out):
        self.size = params.get("size", 4) + (100 if held_out else 0)
        self.seed = seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 2 and self.size == 3:
            raise KeyError("gone")
        return {"prompt": f"{self.seed}+{index}", "label": self.seed + index}

class NoLength:
    def __init__(self, params, seed, held_out): ...
    def __getitem__(self, index): ...

class OtherArguments(Sums):
    def __init__(self, path): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_an_own_class_gives_the_prompts(plain: Tokenizer, own: Path) -> None:
    config = DataConfig(kind="own", path=f"{own}:Sums", params={"size": 3 + 2}, shuffle=False)
    source = build_source(config, 7, plain, 9)
    assert texts(source, 6) == ["7+0", "7+1", "7+2", "7+3", "7+4", "7+0"]
    assert source.name == "Sums"


@pytest.mark.parametrize(
    ("name", "params", "error", "words"),
    [
        ("Sums", {"size": 3}, DataError, "record 2: KeyError: 'gone'"),
        ("Sums", {"size": "x"}, PluginError, "cannot be built"),
        ("NoLength", {}, PluginError, "has no `__len__`"),
        ("OtherArguments", {}, PluginError, r"must take \(params, seed, held_out\)"),
        ("Missing", {}, PluginError, "has no 'Missing'"),
    ],
)
def test_a_broken_own_class_says_what_is_wrong(
    plain: Tokenizer, own: Path, name: str, params: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build_source(DataConfig(kind="own", path=f"{own}:{name}", params=params), 7, plain, 9)
