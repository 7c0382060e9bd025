"""The run file: what is refused, with which words, before any process starts."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.config.file import ConfigError, load_run_file, parse_run_file
from relax.config.reference import reference
from relax.config.serve import APPLICATION_KEYS, DEPLOYMENT_KEYS, TOP_KEYS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "tiny_cpu.yaml"


@pytest.fixture
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = copy.deepcopy(yaml.safe_load(TINY.read_text()))
    return loaded


def refused(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run_file(document, "run.yaml")
    return str(caught.value)


def app(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(a for a in document["applications"] if a["name"] == name)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert load_run_file(path).run.steps > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.stepz=3", "run: unknown key 'stepz' in RunConfig: did you mean 'steps'?"),
        ("actor.optim.lrr=1", "actor.optim: unknown key 'lrr' in OptimConfig: did you mean 'lr'?"),
        ("rollout.data.tsk=copy", "unknown key 'tsk' in DataConfig: did you mean 'task'?"),
        ("rolout.instances=3", "unknown section 'rolout': did you mean 'rollout'?"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1"),
    ],
)
def test_an_unknown_key_fails_with_the_nearest_known_name(override: str, words: str) -> None:
    """behaviour: B40"""
    with pytest.raises(ConfigError) as caught:
        load_run_file(TINY, [override])
    assert words in str(caught.value)


def test_a_fault_in_the_shared_run_is_told_once_and_not_for_each_application() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(TINY, ["run.stepz=3"])
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.use_ref=false"], "need the reference"),
        (["actor.algorithm.kl.coef=0"], "nothing would read it"),
        (["run.group_size=1"], "group_size must be at least 2"),
        (["rollout.sampling.top_p=0.9"], "untruncated log-probs"),
        (["rollout.sampling.temperature=0"], "untruncated log-probs"),
        (["rollout.min_group_size=17"], "larger than run.group_size"),
        (["actor.groups_per_lease=17"], "larger than run.groups_per_step"),
        (["rollout.eval.prompts=4", "rollout.eval.seed=1"], "must differ from run.seed"),
        (["run.max_token_lag=9", "run.overdue=drop"], "only used with run.overdue 'train'"),
        (["run.max_token_lag=0"], "at least run.max_staleness"),
        (["actor.publish_dtype=bfloat16"], "differs from rollout.engine.dtype"),
        (["run.model.kind=hf"], "model.path is required"),
        (["run.bus.max_bytes=65536"], "less than one group at worst"),
        (["actor.algorithm.correction.weight=token"], "correction.weight needs behaviour 'trainer'"),
        (["actor.algorithm.distill.coef=1"], "goes with ref.teachers"),
        (["ref.teachers={math: {path: x}}"], "goes with ref.teachers"),
        (
            ["ref.teachers={math: {path: x}}", "actor.algorithm.distill.coef=1", "rollout.teachers={default: mat}"],
            "unknown teacher 'mat': did you mean 'math'",
        ),
        (["run.teacher_top_k=8"], "goes with actor.algorithm.distill.form"),
        (["run.responses=recorded"], "goes with run.responses 'generated'"),
        (["actor.algorithm={name: sft}"], "goes with actor.algorithm.objective 'sft'"),
        (["actor.algorithm.correction.cap=2"], "set correction.weight too"),
        (["actor.algorithm.advantage=gae"], "actor.critic goes with"),
        (["actor.algorithm.mini_batches=3"], "multiple of actor.algorithm.mini_batches"),
        (["actor.algorithm.advantage=group_men"], "unknown advantage 'group_men'"),
        (["actor.algorithm.objective=sgt"], "unknown objective 'sgt'"),
        (["actor.algorithm.aggregation_constant=3"], "aggregation_constant goes with"),
        (["rollout.data.kind=jsonl"], "data.path is required"),
        (["rollout.data.kind=reasoning_gym"], "use a 'hf' model"),
        (["dcs.host=0.0.0.0"], "give one interface"),
        (["reward.overlong={buffer_tokens: 9}"], "larger than run.max_response_tokens"),
        (["rollout.filter={kind: accuracy_band, low: 0.9, high: 0.1}"], "must be below"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_what_to_do(overrides: list[str], words: str) -> None:
    """behaviour: B40"""
    with pytest.raises(ConfigError) as caught:
        load_run_file(TINY, overrides)
    assert words in str(caught.value)


def test_a_deployment_key_that_serve_would_ignore_is_refused(document: dict[str, Any]) -> None:
    app(document, "reward")["deployments"][0]["num_replica"] = 3
    assert "unknown key 'num_replica': did you mean 'num_replicas'?" in refused(document)


def test_a_deployment_name_that_serve_would_only_refuse_later_is_refused(document: dict[str, Any]) -> None:
    app(document, "actor")["deployments"][0]["name"] = "Trainer"
    assert "unknown name 'Trainer': did you mean 'Actor'?" in refused(document)


def test_two_actors_are_refused(document: dict[str, Any]) -> None:
    app(document, "actor")["deployments"][0]["num_replicas"] = 2
    assert "num_replicas must be 1" in refused(document)


def test_a_missing_role_is_named(document: dict[str, Any]) -> None:
    document["applications"] = [a for a in document["applications"] if a["name"] != "dcs"]
    assert "application 'dcs' is missing" in refused(document)


def test_an_unknown_application_fails_with_the_nearest_role(document: dict[str, Any]) -> None:
    app(document, "reward")["name"] = "rewards"
    assert "unknown application 'rewards': did you mean 'reward'?" in refused(document)


def test_applications_with_different_runs_are_refused(document: dict[str, Any]) -> None:
    args = app(document, "reward")["args"]
    args["run"] = {**args["run"], "seed": 2}
    assert "application 'reward' has another 'run' than 'actor' (differs in seed)" in refused(document)


def test_broken_yaml_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("applications: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_run_file(broken)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_file(tmp_path / "missing.yaml")


def test_overrides_reach_every_application() -> None:
    file = load_run_file(TINY, ["run.steps=7", "actor.optim.lr=0.5", "serve.http_options.port=9999"])
    assert all(a["args"]["run"]["steps"] == 7 for a in file.serve["applications"])
    assert file.actor.optim.lr == 0.5
    assert file.serve["http_options"]["port"] == 9999


def test_the_key_lists_are_those_of_the_installed_serve() -> None:
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    assert set(ServeDeploySchema.model_fields) == TOP_KEYS
    assert set(ServeApplicationSchema.model_fields) == APPLICATION_KEYS
    assert set(DeploymentSchema.model_fields) == DEPLOYMENT_KEYS


def test_the_configuration_loads_without_torch_and_ray() -> None:
    code = "import sys, relax.config.file, relax.config.reference; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "run: python -m relax.config.reference > docs/configuration.md"
    )
