"""Which changes a resumed run allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax.config.file import load_run_file
from relax.config.resume import RULES, Change, changes, known_keys, rule_for, table

TINY = Path(__file__).parents[2] / "deploy" / "tiny_cpu.yaml"


def changed(*overrides: str) -> list[Change]:
    return changes(load_run_file(TINY).resolved(), load_run_file(TINY, overrides).resolved())


def test_every_key_of_the_run_file_is_classed_with_a_reason() -> None:
    keys = [key for key, is_section in known_keys() if not is_section]
    assert {"run.model.path", "rollout.eval.data.kind", "actor.critic.optim.lr", "dcs.keep_checkpoints.best"} <= {*keys}
    may_come_or_go = ["run.simulation", "rollout.teachers", "rollout.eval.data", "reward", "ref", "actor.critic"]
    unclassed = []
    for key in [*keys, *may_come_or_go]:
        try:
            assert len(rule_for(key).reason) > 10
        except KeyError:
            unclassed.append(key)
    assert unclassed == []


def test_the_table_speaks_of_no_key_that_is_not_there_and_of_no_section_that_decides_nothing() -> None:
    keys = dict(known_keys())
    assert sorted(key for key in RULES if key not in keys) == []
    assert "run" not in RULES and "rollout" not in RULES and "actor" not in RULES, "their keys are classed one by one"


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("run.steps=5000", True),
        ("rollout.instances=1", True),
        ("actor.micro_batch_tokens=100", True),
        ("actor.optim.lr=0.5", True),
        ("run.bus.max_rows=4096", True),
        ("rollout.data.epochs=3", True),
        ("dcs.keep_checkpoints.best=3", True),
        ("run.seed=99", False),
        ("run.groups_per_step=8", False),
        ("run.model.hidden_size=32", False),
        ("rollout.data.shuffle=false", False),
        ("rollout.eval.seed=12345", False),
        ("actor.backend=own.py:backend", False),
    ],
)
def test_a_change_is_named_and_classed(override: str, allowed: bool) -> None:
    key, _, value = override.partition("=")
    [change] = changed(override)
    assert change.key == key and change.rule.allowed is allowed
    assert str(change.after).lower() == value and change.rule.reason in str(change)


def test_without_a_change_there_is_none() -> None:
    assert changed() == [] and changed("run.steps=" + str(load_run_file(TINY).run.steps)) == []


def test_a_section_that_comes_is_one_change_and_its_keys_are_classed_when_it_stays() -> None:
    critic: dict[str, Any] = {"optim": {"lr": 0.1}, "value_clip": None}
    before, after = {"actor": {"critic": None}}, {"actor": {"critic": critic}}
    [came] = changes(before, after)
    assert came.key == "actor.critic" and not came.rule.allowed
    other = {"actor": {"critic": {**critic, "optim": {"lr": 0.2}}}}
    [kept] = changes(after, other)
    assert kept.key == "actor.critic.optim.lr" and kept.rule.allowed


def test_mappings_of_values_are_one_key() -> None:
    [change] = changed("rollout.data.params={length: 9}")
    assert change.key == "rollout.data.params" and not change.rule.allowed


def test_a_key_that_another_version_added_is_passed_over_and_a_role_that_comes_is_not() -> None:
    assert changes({"run": {"seed": 1}}, {"run": {"seed": 1, "news": 3}}) == []
    [change] = changes({"run": {}}, {"run": {}, "ref": {"reference": True}})
    assert change.key == "ref" and change.rule.allowed


def test_the_table_in_the_documentation_is_up_to_date() -> None:
    text = (TINY.parents[1] / "docs" / "resuming.md").read_text()
    assert table() in text, "run: python -m relax.config.resume, and put it into docs/resuming.md"
