"""Instances on another node than the trainer: weights over TCP, rows over the head's interface."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e_support import EASY, TINY
from two_nodes import HEAD_IP, TwoNodes, why_not

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = TwoNodes()
    try:
        made.start()
        yield made
    finally:
        made.stop()
    assert made.head.name not in subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=30).stdout
    assert not made.folder.exists()


@pytest.fixture
def on_head(tmp_path: Path) -> Path:
    """The tiny run with every declared deployment on the head."""
    document = yaml.safe_load(TINY.read_text())
    for application in document["applications"]:
        for deployment in application["deployments"]:
            deployment["ray_actor_options"]["resources"] = {"head": 0.001}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


AWAY = ["rollout.instance_resources={away: 0.001}", "controller.expect={}", f"run.bus.host={HEAD_IP}"]


def test_instances_that_see_no_memory_of_the_trainer_adopt_its_weights(
    nodes: TwoNodes, on_head: Path, tmp_path: Path
) -> None:
    """behaviour: B2 B33 B34"""
    folder = tmp_path / "run"
    settings = [*EASY, *AWAY, f"dcs.host={HEAD_IP}", "run.steps=12", f"run.run_dir={folder}"]
    done = nodes.run(folder, on_head, *settings, deadline_s=420)
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["digest_ok"] and set(summary["engine_versions"].values()) == {12}
    assert summary["produced"] == summary["trained"] == 12 * 8 * 16
    assert summary["restarts_unasked"] == 0 and summary["logprob_gap_max"] <= 1e-4
    served, adopted = done.counters("dcs")["tcp_served"], done.counters("rollout-0")["adoptions"]
    assert 2 <= served <= 13 and adopted >= 2, "two instances on a node pull a version once"
    assert not [name for name in done.counters("dcs") if name.startswith("tcp_refused")]
    # Where the weights were while it ran is where nothing of them is now; and never on this machine's own memory.
    assert nodes.shm(nodes.head) == nodes.shm(nodes.away) == []
    run_id = json.loads((folder / "state.json").read_text())["run_id"]
    assert not [name for name in os.listdir("/dev/shm") if run_id in name]


def test_an_instance_that_cannot_reach_the_weights_ends_the_run_and_says_which_key_to_set(
    nodes: TwoNodes, on_head: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = [*EASY, *AWAY, "run.steps=3", "rollout.instances=1", f"run.run_dir={folder}"]
    done = nodes.run(folder, on_head, *settings, deadline_s=420)
    assert done.exit_code == 1
    reason = json.loads((folder / "summary.json").read_text())["reason"]
    assert "127.0.0.1" in reason and "set dcs.host" in reason, done.output
