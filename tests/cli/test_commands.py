"""The `relax` command where no run is needed: what it refuses, and with which words."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relax.cli.check import PROCESS_BYTES, check
from relax.cli.main import app
from relax.cli.run import document_for, prepare_run_dir
from relax.config.file import ConfigError, load_run_file
from relax.config.run import ModelConfig
from relax.data.models import ensure_model

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "tiny_cpu.yaml"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def relax(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def checked(*overrides: str) -> str:
    """The words of the refusal."""
    with pytest.raises(ConfigError) as caught:
        check(load_run_file(TINY, overrides), check_port=False)
    return str(caught.value)


def test_check_prints_the_placement_and_the_bounds() -> None:
    """behaviour: B40"""
    result = relax("check", str(TINY), "--json", "--set", "serve.http_options.port=0")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["samples_per_step"] == 256 and facts["admission_capacity_groups"] == 32
    assert {item["role"] for item in facts["placement"]} >= {"actor", "ref", "instance", "reward", "dcs", "controller"}
    assert 80_000 < facts["parameters"] < 120_000


def test_check_refuses_a_port_in_use(taken_port: int) -> None:
    result = relax("check", str(TINY), "--set", f"serve.http_options.port={taken_port}")
    assert result.exit_code == 2
    assert f"port {taken_port} on 127.0.0.1 is in use" in result.output.replace("\n", " ")


def test_check_names_a_missing_model_folder(tmp_path: Path) -> None:
    words = checked(f"run.model={{kind: hf, path: {tmp_path / 'none'}}}")
    assert str(tmp_path / "none") in words and "does not exist" in words


def test_check_names_a_broken_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "no weights" in checked(f"run.model={{kind: hf, path: {tmp_path}}}")


DISTILLED = (
    "run.use_ref=true",
    "ref.reference=false",
    "actor.algorithm={name: opd}",
    "rollout.teachers={default: math}",
)


def test_check_looks_at_the_folders_of_teachers_reference_and_critic(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert "ref.teachers.math: " in checked(*DISTILLED, f"ref.teachers={{math: {{path: {none}}}}}")
    assert "ref.path: " in checked(f"ref.path={none}")
    assert "actor.critic.path: " in checked(
        "actor.algorithm={name: ppo, kl: {coef: 0.01}}", f"actor.critic={{path: {none}}}"
    )


def test_teachers_take_memory_of_their_own(tmp_path: Path) -> None:
    folder = ensure_model(ModelConfig(), tmp_path / "teacher", 1)
    file = load_run_file(TINY, [*DISTILLED, f"ref.teachers={{math: {{path: {folder}}}}}"])
    roles = {item.role: item for item in check(file, check_port=False).placements}
    assert roles["teacher math"].memory_bytes > PROCESS_BYTES


def test_check_names_file_and_line_of_a_broken_row(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1>", "label": "1"}\n{"prompt": \n')
    words = checked(f"rollout.data={{kind: jsonl, path: {data}}}")
    assert f"{data}:2" in words or (str(data) in words and "line 2" in words)


def test_check_refuses_a_worker_without_step(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("class Mine:\n    def __init__(self, context): pass\n")
    words = checked(f"rollout.worker={worker}:Mine")
    assert "rollout.worker" in words and "has no `step`" in words and str(worker) in words


def test_check_refuses_an_unknown_reward_with_the_known_ones() -> None:
    words = checked("reward.parts=[{name: exakt}]")
    assert "exakt" in words and "exact" in words


def test_check_names_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """behaviour: B40"""
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python notes that there is no such module
    words = checked("controller.trackers=[wandb]")
    assert "controller.trackers: wandb is not installed" in words and "pip install" in words


def test_check_refuses_a_run_that_does_not_fit_into_memory() -> None:
    assert "needs about" in checked("rollout.instances=4000")


def test_check_refuses_a_disk_without_the_reserve() -> None:
    """behaviour: B47"""
    words = checked("dcs.reserve_bytes=1000000000000000")
    assert "free some space" in words


def test_a_run_folder_is_not_mixed_with_another_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds a run already"):
        prepare_run_dir(tmp_path, overwrite=False)
    prepare_run_dir(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not a run folder"):
        prepare_run_dir(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_private_ray_gets_its_own_port_and_absolute_folder(tmp_path: Path) -> None:
    """behaviour: B32"""
    document = document_for(load_run_file(TINY), tmp_path, 12345)
    assert document["http_options"]["port"] == 12345
    assert {a["args"]["run"]["run_dir"] for a in document["applications"]} == {str(tmp_path)}


def test_status_says_where_nobody_answers(taken_port: int) -> None:
    result = relax("status", f"http://127.0.0.1:{taken_port}")
    assert result.exit_code == 1 and "no controller answers" in result.output


def test_logs_of_an_unknown_role_say_where_was_looked(tmp_path: Path) -> None:
    result = relax("logs", "acter", str(tmp_path))
    assert result.exit_code == 1 and "no log of 'acter'" in result.output


def test_export_of_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    result = relax("export", str(tmp_path), "--to", str(tmp_path / "out"))
    assert result.exit_code == 1 and "config.json is missing" in result.output


def test_an_unknown_model_name_lists_the_known_ones() -> None:
    result = relax("models", "get", "gpt")
    assert result.exit_code == 2 and "smollm2" in result.output


@pytest.mark.parametrize("command", ["run", "check", "status", "stop", "logs", "export", "models"])
def test_every_command_explains_itself(command: str) -> None:
    result = relax(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output
