"""A recorded step, computed again without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_maker import GROUPS, MEMBERS, change_file, changed, make_dumps
from safetensors.numpy import load_file, save_file

from relax.checkpoint.manifest import TENSORS
from relax.config.file import ConfigError
from relax.dump.compare import Compared
from relax.dump.files import read_dump, write_dump
from relax.dump.record import DumpError
from relax.dump.replay import compare_replay, replay

OWN = """
def ends_with(response, label, metadata, digit="0"):
    return float(response.endswith(digit))

def by_rank(rows):
    return {row.row_id: float(rank) for rank, row in enumerate(sorted(rows, key=lambda row: row.reward))}
"""

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}, "entropy_coef": 0.01}},
    "dapo": {"algorithm": {"name": "dapo", "mini_batches": 2}},
    "gspo": {"algorithm": {"name": "gspo"}},
    "m2po": {"algorithm": {"name": "m2po", "m2_threshold": 0.3}},
    "reinforce_pp": {"algorithm": {"name": "reinforce_pp", "kl": {"coef": 0.1}}},
    "ppo": {
        "algorithm": {"name": "ppo", "mini_batches": 2, "epochs": 2, "behaviour": "trainer"},
        "critic": {"optim": {"lr": 1e-2}},
    },
    "sft": {"algorithm": {"name": "sft"}},
    "dpo": {"algorithm": {"name": "dpo"}},
}


def by_name(compared: list[Compared]) -> dict[str, Compared]:
    return {field.field: field for field in compared}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("m2po", "reinforce_pp", "gspo") else name for name in RUNS],
)
def test_a_replay_agrees_with_the_record_for_every_kind_of_algorithm(name: str, tmp_path: Path) -> None:
    """The second step: its weights, moments and critic are not those of the start."""
    made = make_dumps(tmp_path, steps=2, **RUNS[name])
    assert made.reporter.counts == {"steps_dumped": 2}
    dump = read_dump(made.folder(2))
    again = replay(dump, made.folder(2), base=tmp_path)
    found = by_name(compare_replay(dump, again, 1e-6))
    assert {"loss", "grad_norm", "trainer_logprobs", "advantages"} <= set(found)
    assert [field for field in found.values() if not field.equal] == []
    assert max(field.largest for field in found.values()) <= 1e-6
    assert found["grad_norm"].left is not None and found["grad_norm"].left > 1e-3
    assert again.digests == dump.digests, "the same update on the same machine gives the same weights"
    if name not in ("sft", "dpo"):
        assert found["reward"].total == GROUPS * MEMBERS and np.ptp([r.values["reward"] for r in dump.rows.values()])
    if name == "ppo":
        assert {"values", "returns", "value_loss"} <= set(found) and len(again.updates) == 8


def test_a_recipes_own_reward_and_advantage_are_called_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = make_dumps(
        tmp_path / "run",
        {"name": "grpo", "advantage": "own.py:by_rank"},
        parts=[{"name": "own.py:ends_with", "params": {"digit": "7"}}],
        base=tmp_path,
    )
    dump = read_dump(made.folder())
    assert all(field.equal for field in compare_replay(dump, replay(dump, made.folder(), base=tmp_path), 1e-6))
    other = replay(dump, made.folder(), ["reward.parts=[{name: overlap}]"], base=tmp_path)
    assert not by_name(compare_replay(dump, other, 1e-6))["reward"].equal


def test_a_reward_changed_in_the_file_is_named_with_its_row(tmp_path: Path) -> None:
    """The recorded advantages are those of the true reward: only the reward itself is off."""
    made = make_dumps(tmp_path, {"name": "grpo"})
    row_id = "toy:0:102/1/0"
    truth = read_dump(made.folder()).rows[row_id].values["reward"]
    change_file(made.folder(), row_id, "reward", truth + 0.25)
    dump = read_dump(made.folder())
    wrong = [f for f in compare_replay(dump, replay(dump, made.folder(), base=tmp_path), 1e-6) if not f.equal]
    assert [field.field for field in wrong] == ["reward"]
    place = wrong[0].first
    assert place is not None and place.row_id == row_id and wrong[0].differing == 1
    assert place.gap == pytest.approx(0.25)


def test_one_changed_weight_is_seen_in_the_weights_and_in_all_that_follows(tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo"})
    dump, path = read_dump(made.folder()), made.folder() / "state" / TENSORS
    tensors = load_file(path)
    tensors["model.model.norm.weight"][0] += 0.5
    save_file(tensors, path)
    write_dump(dump, made.folder())  # with the digest of the changed file
    found = compare_replay(dump, replay(dump, made.folder(), base=tmp_path), 1e-6)
    wrong = [field.field for field in found if not field.equal]
    assert wrong[0] == "weights_before" and {"trainer_logprobs", "grad_norm"} <= set(wrong)
    assert by_name(found)["advantages"].equal


def test_recorded_rewards_are_taken_where_the_function_is_not_called(tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo"})
    row_id = "toy:0:102/1/0"
    dump = read_dump(made.folder())
    other = changed(dump, row_id, "reward", dump.rows[row_id].values["reward"] + 0.25)
    found = by_name(compare_replay(other, replay(other, made.folder(), base=tmp_path, recorded_rewards=True), 1e-6))
    assert found["reward"].equal
    assert found["advantages"].differing == 11, "of the whole group: three rows of 4, 4 and 3 tokens"


def test_what_if_another_setting_had_been_used(tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo", "clip_low": 0.05, "clip_high": 0.05})
    dump = read_dump(made.folder())
    wide = replay(dump, made.folder(), ["actor.algorithm.clip_high=4.0"], base=tmp_path)
    found = by_name(compare_replay(dump, wide, 1e-6))
    assert found["advantages"].equal and not found["loss_terms"].equal and not found["loss"].equal
    preset = replay(dump, made.folder(), ["actor.algorithm.name=dapo"], base=tmp_path)
    assert preset.config["actor"]["algorithm"] == {"name": "dapo"}, "the preset's own bounds, not the recorded ones"
    assert preset.result["loss"] != dump.result["loss"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["actor.algorithm.kl={coef: 0.1}"], "has no 'ref_logprobs'"),
        (["actor.algorithm.name=ppo"], "no critic"),
        (["actor.algorithm.clip_hihg=1"], "did you mean 'clip_high'"),
        (["ref.rows_per_lease=3"], "no application 'ref'"),
    ],
)
def test_what_was_not_recorded_cannot_be_asked_for(settings: list[str], words: str, tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo"})
    with pytest.raises((DumpError, ConfigError), match=words):
        replay(read_dump(made.folder()), made.folder(), settings, base=tmp_path)


def test_a_dump_without_weights_says_so(tmp_path: Path) -> None:
    made = make_dumps(tmp_path, {"name": "grpo"}, at=("rollout", "reward"))
    dump = read_dump(made.folder())
    assert not dump.has("advantages") and not dump.digests
    with pytest.raises(DumpError, match="has no weights"):
        replay(dump, made.folder(), base=tmp_path)
