from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax.config.data import DataConfig
from relax.data.source import EpochSource, build_eval_set, build_source, epoch_order
from relax.data.tokenizer import Tokenizer
from relax.types import DataError, Prompt

RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def toy(size: int = 5, **more: Any) -> DataConfig:
    return DataConfig(**{"kind": "toy", "task": "reverse", "size": size, **more})


def take(source: Any, count: int) -> list[Prompt | None]:
    return [source.next() for _ in range(count)]


def jsonl(tmp_path: Path, *lines: str, **more: Any) -> DataConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DataConfig(kind="jsonl", path=str(path), **more)


@RELAXED
@given(
    size=st.integers(1, 7),
    epochs=st.none() | st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
    stops=st.lists(st.integers(0, 9), max_size=4),
)
def test_a_resumed_cursor_goes_on_with_exactly_the_next_prompt(
    plain: Tokenizer, size: int, epochs: int | None, shuffle: bool, seed: int, stops: list[int]
) -> None:
    """Anywhere, any number of times, over epoch borders and past the end."""
    config = toy(size, epochs=epochs, shuffle=shuffle)
    unbroken = take(build_source(config, seed, plain, 32), sum(stops) + 5)
    source, got = build_source(config, seed, plain, 32), []
    for stop in stops:
        got += take(source, stop)
        state = json.loads(json.dumps(source.state_dict()))
        source = build_source(config, seed, plain, 32)
        source.load_state_dict(state)
    assert got + take(source, 5) == unbroken


@RELAXED
@given(bad=st.sets(st.integers(0, 5), max_size=5), stop=st.integers(0, 12), shuffle=st.booleans())
def test_skipped_rows_are_counted_equally_with_and_without_a_resume(
    plain: Tokenizer, bad: set[int], stop: int, shuffle: bool
) -> None:
    class Rows:
        name, checked = "rows", False

        def __len__(self) -> int:
            return 6

        def row(self, position: int) -> Any:
            from relax.data.rows import Row

            return Row(position, f"row {position}", text="" if position in bad else "x")

        def identity(self) -> dict[str, Any]:
            return {}

    def build() -> EpochSource:
        from relax.data.rows import RowCheck

        return EpochSource(Rows(), seed=3, shuffle=shuffle, epochs=3, check=RowCheck(plain, 9), on_bad_row="skip")

    whole, first, second = build(), build(), build()
    expected = take(whole, 25)
    got = take(first, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + take(second, 25 - stop) == expected
    assert second.skipped == whole.skipped == 3 * len(bad)


def test_each_epoch_has_every_row_once_in_another_order(plain: Tokenizer) -> None:
    source = build_source(toy(50), 1, plain, 32)
    first, second = take(source, 50), take(source, 50)
    orders = [[p.index for p in part if p] for part in (first, second)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 2
    assert orders[0] != orders[1] and orders[0] != list(range(50))
    assert {p.epoch for p in first if p} == {0} and {p.epoch for p in second if p} == {1}
    assert len({p.group_id for p in first + second if p}) == 100


def test_the_order_of_an_epoch_is_a_fixed_function_of_seed_and_epoch() -> None:
    """Golden orders: a change here would break every saved cursor."""
    assert epoch_order(8, 1, 0) == [2, 4, 7, 5, 0, 6, 3, 1]
    assert epoch_order(8, 1, 1) == [5, 6, 3, 0, 7, 2, 1, 4]
    assert epoch_order(8, 2, 0) == [7, 3, 6, 0, 1, 4, 5, 2]


def test_without_shuffling_rows_come_in_order(plain: Tokenizer) -> None:
    source = build_source(toy(4, shuffle=False), 1, plain, 32)
    assert [p.index for p in take(source, 8) if p] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_bounded_epochs_end_and_stay_ended(plain: Tokenizer) -> None:
    source = build_source(toy(3, epochs=2), 1, plain, 32)
    assert [p is None for p in take(source, 9)] == [False] * 6 + [True] * 3


def test_a_longer_run_goes_on_behind_a_finished_one(plain: Tokenizer) -> None:
    short, long = build_source(toy(3, epochs=1), 1, plain, 32), build_source(toy(3, epochs=2), 1, plain, 32)
    take(short, 4)
    long.load_state_dict(short.state_dict())
    first = long.next()
    assert first is not None and first.epoch == 1


def test_the_length_is_that_of_one_epoch(plain: Tokenizer) -> None:
    assert len(build_source(toy(7), 1, plain, 32)) == 7


@pytest.mark.parametrize(
    ("other", "seed"),
    [
        (toy(5, task="copy"), 1),
        (toy(6), 1),
        (toy(5, shuffle=False), 1),
        (toy(5, params={"length": 4}), 1),
        (toy(5, system_prompt="x"), 1),
        (toy(5), 2),
    ],
)
def test_the_cursor_of_another_source_is_refused(plain: Tokenizer, other: DataConfig, seed: int) -> None:
    state = build_source(toy(5), 1, plain, 32).state_dict()
    with pytest.raises(DataError, match="the saved cursor belongs to source 'reverse'"):
        build_source(other, seed, plain, 32).load_state_dict(state)


def test_the_cursor_of_a_file_is_refused_once_the_file_was_edited(plain: Tokenizer, tmp_path: Path) -> None:
    state = build_source(jsonl(tmp_path, '{"prompt": "a"}'), 1, plain, 32).state_dict()
    with pytest.raises(DataError, match="the file's content"):
        build_source(jsonl(tmp_path, '{"prompt": "b"}'), 1, plain, 32).load_state_dict(state)


def test_a_cursor_of_another_schema_is_refused(plain: Tokenizer) -> None:
    source = build_source(toy(5), 1, plain, 32)
    with pytest.raises(DataError, match="schema 0; this version reads schema 1"):
        source.load_state_dict({**source.state_dict(), "schema": 0})


def test_an_over_long_generated_prompt_fails_with_its_index(plain: Tokenizer) -> None:
    source = build_source(toy(5, shuffle=False), 1, plain, 3)
    for _ in range(2):
        with pytest.raises(DataError, match=r"toy task 'reverse', prompt 0: the prompt has 4 tokens.*is 3"):
            source.next()


def test_a_source_without_any_usable_row_ends_instead_of_searching_for_ever(plain: Tokenizer) -> None:
    source = build_source(toy(5, on_bad_row="skip"), 1, plain, 3)
    with pytest.raises(DataError, match=r"no usable row: 5 skipped in turn; the last: .*4 tokens"):
        source.next()


def test_the_evaluation_set_is_fixed_and_has_its_own_group_ids(plain: Tokenizer) -> None:
    first = build_eval_set(toy(2), 10_007, 20, plain, 32)
    assert first == build_eval_set(toy(2), 10_007, 20, plain, 32)
    assert len({p.group_id for p in first}) == 20
    assert {p.source for p in first} == {"eval-reverse"}


def test_the_evaluation_set_of_a_toy_never_occurs_in_training_even_at_the_same_seed(plain: Tokenizer) -> None:
    trained = {p.text for p in take(build_source(toy(1500), 1, plain, 32), 1500) if p}
    held_out = {p.text for p in build_eval_set(toy(1500), 1, 100, plain, 32)}
    assert held_out and not held_out & trained
    assert len(trained) > 600


def test_the_evaluation_set_of_a_file_is_its_first_rows(plain: Tokenizer, tmp_path: Path) -> None:
    config = jsonl(tmp_path, '{"prompt": "a"}', '{"prompt": ""}', '{"prompt": "b"}', on_bad_row="skip")
    assert [p.text for p in build_eval_set(config, 1, 2, plain, 32)] == ["a", "b"]
    with pytest.raises(DataError, match=r"wants 3 prompts, .*data.jsonl' has 2 different usable"):
        build_eval_set(config, 1, 3, plain, 32)


def test_a_training_file_cannot_take_the_name_of_an_evaluation_source(plain: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "eval-a b:c.jsonl"
    path.write_text('{"prompt": "a"}')
    assert build_source(DataConfig(kind="jsonl", path=str(path)), 1, plain, 32).name == "eval_a_b_c"


def test_a_text_prompt_gets_the_system_prompt_in_front(plain: Tokenizer) -> None:
    prompt = build_source(toy(1, system_prompt="Reverse"), 1, plain, 32).next()
    assert prompt is not None and prompt.text is not None and prompt.text.startswith("Reverse\n\n")
