from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relax.config.data import DataConfig
from relax.data.recorded import Recorded, recorded_trajectory
from relax.data.source import build_source
from relax.data.tokenizer import Tokenizer
from relax.types import DataError, PolicyVersion, Prompt


def source_of(tmp_path: Path, tokenizer: Tokenizer, record: dict[str, object], recorded: Recorded) -> Prompt:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record))
    prompt = build_source(DataConfig(kind="jsonl", path=str(path)), 1, tokenizer, 9, recorded).next()
    assert prompt is not None
    return prompt


def test_a_response_or_a_pair_comes_from_the_record(plain: Tokenizer, tmp_path: Path) -> None:
    one, two = Recorded(1, 9), Recorded(2, 9)
    assert one.texts(source_of(tmp_path, plain, {"prompt": "a", "response": "b"}, one)) == ["b"]
    assert one.texts(source_of(tmp_path, plain, {"prompt": "a", "label": "c"}, one)) == ["c"]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert two.texts(source_of(tmp_path, plain, pair, two)) == ["b", "c"]


@pytest.mark.parametrize(
    ("record", "count", "words"),
    [
        ({"prompt": "a"}, 1, "needs `response`"),
        ({"prompt": "a", "label": 3}, 1, "needs `response`"),
        ({"prompt": "a", "response": ""}, 1, "not empty"),
        ({"prompt": "a", "response": "b"}, 2, "needs `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b"}, 2, "found chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, 2, "`rejected` must be a string"),
        ({"prompt": "a", "response": "0123456789"}, 1, "a response has 11 tokens with its end token"),
        ({"prompt": "a", "response": "\u00e9"}, 1, "cannot encode"),
    ],
)
def test_a_record_without_usable_responses_is_refused_with_its_place(
    plain: Tokenizer, tmp_path: Path, record: dict[str, object], count: int, words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        source_of(tmp_path, plain, record, Recorded(count, 9))
    assert "data.jsonl:1: " in str(caught.value)


def test_a_recorded_response_is_a_valid_trajectory(plain: Tokenizer) -> None:
    """behaviour: B23 B24. The mask covers the response and its end token."""
    prompt = Prompt("s", 0, 0, text="12", label="34")
    rendered = plain.render(prompt)
    [response] = Recorded(1, 9).tokens(prompt, plain)
    assert response[-1] == plain.eos_ids[0] and plain.decode(response) == "34"
    trajectory = recorded_trajectory(rendered, response, PolicyVersion(3))
    trajectory.validate()
    assert trajectory.tokens.tolist() == [*rendered, *response]
    assert np.flatnonzero(trajectory.loss_mask).tolist() == [2, 3, 4]
