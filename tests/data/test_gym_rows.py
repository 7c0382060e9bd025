from __future__ import annotations

import json
from typing import Any

import pytest

from relax.config.data import DataConfig
from relax.data.gym import GymRows, pack, score_answer, unpack
from relax.data.source import build_eval_set, build_source
from relax.data.tokenizer import Tokenizer
from relax.types import DataError

CHAIN = {"kind": "reasoning_gym", "task": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}}


def test_a_gym_task_gives_chat_messages_where_the_tokenizer_has_a_template(chat: Tokenizer) -> None:
    source = build_source(DataConfig(**CHAIN, size=8, system_prompt="Just the number."), 1, chat, 400)
    prompt = source.next()
    assert prompt is not None and prompt.messages is not None and prompt.text is None
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[0]["content"] == "Just the number."
    assert prompt.source == "chain_sum"


def test_a_gym_task_gives_text_without_a_template(plain: Tokenizer) -> None:
    prompt = build_source(DataConfig(**CHAIN, size=8, system_prompt="Just the number."), 1, plain, 400).next()
    assert prompt is not None and prompt.messages is None and prompt.text is not None
    assert prompt.text.startswith("Just the number.\n\n")


def test_gym_prompts_are_functions_of_seed_and_index(chat: Tokenizer) -> None:
    def draw(seed: int, size: int = 8) -> list[str]:
        rows = GymRows("chain_sum", {}, size, seed, chat=False)
        return [str(rows.row(i).text) for i in range(8)]

    assert draw(1) == draw(1, size=100)
    assert not set(draw(1)) & set(draw(2)), "seeds next to each other share no entry"


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi", "graph_color"])
def test_the_metadata_is_enough_to_score_after_a_trip_as_json(task: str) -> None:
    """arc_agi compares tuples, which plain JSON would turn into lists; graph_color has no single answer."""
    rows = GymRows(task, {}, 3, 5, chat=False)
    row, entry = rows.row(2), rows._dataset[2]
    metadata = json.loads(json.dumps(row.metadata))
    answer: Any = entry["answer"]
    if answer is None:
        answer = json.dumps(entry["metadata"]["possible_answer"])
    assert rows._dataset.score_answer(answer, entry) == 1.0
    assert score_answer(metadata, answer) == 1.0
    assert score_answer(metadata, "certainly wrong") < 0.1
    assert row.label == entry["answer"]


@pytest.mark.parametrize("value", [(1, (2, [3])), {1: "a", (0, 1): {"x": ()}}, {"__tuple__": 1}, {"a": None}])
def test_packed_entries_come_back_exactly(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_scoring_a_prompt_from_elsewhere_is_an_error() -> None:
    with pytest.raises(DataError, match="does not come from a reasoning-gym source"):
        score_answer({}, "3")


def test_the_held_out_set_of_another_seed_differs(chat: Tokenizer) -> None:
    config = DataConfig(**CHAIN, size=8)
    held = build_eval_set(config, 10_007, 5, chat, 400)
    trained = [build_source(config, 1, chat, 400).next()]
    assert {p.source for p in held} == {"eval-chain_sum"}
    assert held[0].messages != trained[0].messages  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("chain_sums", {}, "unknown reasoning-gym task 'chain_sums' in data.task: did you mean 'chain_sum'"),
        ("chain_sum", {"bogus": 1}, "data.params of the reasoning-gym task 'chain_sum': .*'bogus'"),
        ("chain_sum", {"min_terms": -3}, "data.params of the reasoning-gym task 'chain_sum': min_terms"),
    ],
)
def test_bad_gym_settings_are_named(task: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        GymRows(task, params, 5, 1, chat=False)


def test_held_out_questions_are_never_trained_and_all_different(chat: Tokenizer) -> None:
    config = DataConfig(
        kind="reasoning_gym",
        task="chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        size=2000,
    )
    source = build_source(config, 1, chat, 400)
    trained = {str(source.next().messages) for _ in range(2000)}  # type: ignore[union-attr]
    held = [str(prompt.messages) for prompt in build_eval_set(config, 10_007, 12, chat, 400)]
    assert len(set(held)) == 12
    assert not trained & set(held)
    with pytest.raises(DataError, match="different usable"):
        build_eval_set(config, 10_007, 128, chat, 400)
