"""Everything about a run file that can be known before a process starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from relax.checkpoint.manifest import SNAPSHOT_BUFFERS
from relax.cli.cluster import port_is_free
from relax.config.base import nearest
from relax.config.cross import eval_data, worst_group_bytes
from relax.config.file import ConfigError
from relax.config.sections import RunFile
from relax.telemetry.metrics import METRICS
from relax.telemetry.trackers import missing_trackers
from relax.types import RelaxError

if TYPE_CHECKING:
    from relax.data.tokenizer import Tokenizer

POLICY, REFERENCE, CRITIC = "run.model", "ref.path", "actor.critic.path"
PROCESS_BYTES = 320 << 20
"""Proportional memory of one replica with torch and transformers loaded (measured)."""
LIGHT_PROCESS_BYTES = 120 << 20
"""The same without torch."""


@dataclass(frozen=True, slots=True)
class Placement:
    role: str
    processes: int
    num_cpus: float
    memory_bytes: int
    note: str = ""


@dataclass(slots=True)
class CheckReport:
    placements: list[Placement]
    parameters: int
    disk_bytes: int
    shm_bytes: int
    warnings: list[str] = field(default_factory=list)

    @property
    def memory_bytes(self) -> int:
        return sum(item.memory_bytes for item in self.placements)


def check(file: RunFile, *, check_port: bool = True, run_dir: Path | None = None) -> CheckReport:
    """Model, data, plugins, port, memory, disk. Raises `ConfigError` with every problem found."""
    problems: list[str] = []
    sizes = {POLICY: 0}
    try:
        sizes = _check_model_and_data(file)
    except RelaxError as error:
        problems += str(error).splitlines()
    problems += _check_plugins(file)
    keep = file.dcs.keep_checkpoints
    if keep.best and keep.best_by not in METRICS:
        problems.append(
            f"dcs.keep_checkpoints.best_by: unknown metric '{keep.best_by}'{nearest(keep.best_by, METRICS)}"
        )
    problems += missing_trackers(file.controller.trackers)
    http = file.serve.get("http_options") or {}
    host, port = http.get("host", "127.0.0.1"), int(http.get("port", 8000))
    if check_port and not port_is_free(host, port):
        problems.append(
            f"http_options: port {port} on {host} is in use: choose another (--set serve.http_options.port=N)"
        )
    report = plan(file, sizes)
    memory = psutil.virtual_memory()
    if report.memory_bytes > memory.total:
        problems.append(
            f"the run needs about {report.memory_bytes >> 20} MiB of memory, this machine has "
            f"{memory.total >> 20} MiB: fewer rollout.instances or a smaller model"
        )
    elif report.memory_bytes > memory.available:
        report.warnings.append(
            f"needs about {report.memory_bytes >> 20} MiB of memory, {memory.available >> 20} MiB are free now"
        )
    problems += _check_space(file, report, run_dir or Path.cwd())
    if file.actor.algorithm.name == "dapo" and file.rollout.filter.kind == "none":
        report.warnings.append("DAPO without dynamic sampling: set rollout.filter.kind to accuracy_band")
    if file.run.faults:
        report.warnings.append(f"faults are injected: {', '.join(file.run.faults)}")
    if file.run.fault_points:
        points = (f"{fault.action} {fault.role} at {fault.point}" for fault in file.run.fault_points)
        report.warnings.append(f"processes will fail: {', '.join(points)}")
    if problems:
        raise ConfigError(problems)
    return report


def _check_model_and_data(file: RunFile) -> dict[str, int]:
    """Parameters of the policy and of the run's other models. Builds the prompt source and reads its first prompts."""
    import tempfile

    from relax.data.models import count_parameters, ensure_model
    from relax.data.recorded import recorded_of
    from relax.data.source import build_eval_set, build_source
    from relax.data.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory(prefix="relax-check-") as folder:
        model = ensure_model(file.run.model, Path(folder) / "model", file.run.seed)
        tokenizer = Tokenizer.load(model)
        source = build_source(
            file.rollout.data, file.run.seed, tokenizer, file.run.max_prompt_tokens, recorded_of(file.run)
        )
        prompt = source.next()
        if prompt is None:
            raise ConfigError(["rollout.data: the source holds no usable prompt"])
        tokenizer.render(prompt)
        if file.rollout.eval.prompts:
            evaluation = file.rollout.eval
            build_eval_set(
                eval_data(file.rollout), evaluation.seed, evaluation.prompts, tokenizer, file.run.max_prompt_tokens
            )
        return {POLICY: count_parameters(model), **_check_other_models(file, tokenizer)}


def _check_other_models(file: RunFile, tokenizer: Tokenizer) -> dict[str, int]:
    """Parameters of each model that is given by its folder. Raises `ConfigError` that names the key of a wrong one."""
    from relax.data.models import count_parameters, validate_model_folder
    from relax.data.tokenizer import Tokenizer, check_same_vocabulary

    teachers = {} if file.ref is None else {f"ref.teachers.{name}": t.path for name, t in file.ref.teachers.items()}
    folders: dict[str, str | None] = {
        **teachers,
        REFERENCE: None if file.ref is None else file.ref.path,
        CRITIC: None if file.actor.critic is None else file.actor.critic.path,
    }
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for key, folder in folders.items():
        if folder is None:
            continue
        try:
            validate_model_folder(Path(folder))
            if key in teachers:
                check_same_vocabulary(tokenizer, Tokenizer.load(Path(folder)))
            sizes[key] = count_parameters(Path(folder))
        except RelaxError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return sizes


def _check_plugins(file: RunFile) -> list[str]:
    from relax.algorithms import build_loss, own_advantage
    from relax.plugins import load_function
    from relax.rewards.functions import resolve
    from relax.rollout.load import load_worker
    from relax.training.own_trainer import load_trainer

    problems = []
    try:
        load_worker(file.rollout.worker, Path.cwd())
    except RelaxError as error:
        problems.append(f"rollout.worker: {error}")
    own = file.rollout.filter.kind
    try:
        if ":" in own:
            load_function(own, Path.cwd())
    except RelaxError as error:
        problems.append(f"rollout.filter: {error}")
    try:
        if file.actor.trainer is not None:
            load_trainer(file.actor.trainer, Path.cwd())
        own_advantage(file.actor.algorithm, Path.cwd())
        build_loss(file.actor.algorithm, file.run.max_response_tokens, Path.cwd())
    except RelaxError as error:
        problems.append(f"actor: {error}")
    for part in file.reward.parts if file.reward else ():
        try:
            resolve(part.name, part.params, Path.cwd())
        except RelaxError as error:
            problems.append(f"reward.parts: {error}")
    return problems


def plan(file: RunFile, sizes: Mapping[str, int]) -> CheckReport:
    """Processes and memory by role. `sizes`: parameters by model, those of the policy for what is not there.

    Adam keeps two moments beside weights and gradients (16 bytes a parameter).
    """
    parameters = sizes[POLICY]
    trained = parameters + (0 if file.actor.critic is None else sizes.get(CRITIC, parameters))
    width = 2 if file.rollout.engine.dtype == "bfloat16" else 4
    cpus = {app["name"]: _num_cpus(app) for app in file.serve["applications"]}
    placements = [
        Placement("controller", 1, cpus["controller"], LIGHT_PROCESS_BYTES, "health, state, HTTP"),
        Placement("bus", 1 + file.run.bus.storage_units, 0.0, 2 * LIGHT_PROCESS_BYTES, "TransferQueue"),
        Placement("dcs", 1, cpus["dcs"], LIGHT_PROCESS_BYTES, "weights, checkpoints"),
        Placement("rollout", 1, cpus["rollout"], LIGHT_PROCESS_BYTES, "prompts, ledger, instances"),
        Placement(
            "actor",
            1,
            cpus["actor"],
            PROCESS_BYTES + 16 * trained,
            f"backend {file.actor.backend}" + ("" if file.actor.critic is None else ", with a critic"),
        ),
    ]
    if file.run.generates:
        placements.append(
            Placement(
                "instance",
                file.rollout.instances,
                file.rollout.instance_num_cpus,
                file.rollout.instances * (PROCESS_BYTES + 2 * width * parameters),
                f"engine {file.rollout.engine.backend}, {file.rollout.engine.slots} slots",
            )
        )
    if file.reward is not None:
        memory = LIGHT_PROCESS_BYTES * (1 + file.reward.workers)
        placements.append(Placement("reward", 1, cpus["reward"], memory, "killable workers"))
    if file.ref is not None and file.run.use_ref:
        model = 4 * sizes.get(REFERENCE, parameters) if file.ref.reference else 0
        placements.append(Placement("ref", 1, cpus["ref"], PROCESS_BYTES + model, "reference log-probs"))
        for name, teacher in file.ref.teachers.items():
            model = 4 * sizes.get(f"ref.teachers.{name}", parameters)
            placements.append(
                Placement(f"teacher {name}", 1, teacher.num_cpus, PROCESS_BYTES + model, "teacher log-probs")
            )
    return CheckReport(
        placements=placements,
        parameters=parameters,
        disk_bytes=(_checkpoints(file) + 1) * 12 * parameters + 8 * parameters,
        # The instances' copy, where it lies beside the store; and snapshots of weights and two moments.
        shm_bytes=(file.dcs.keep_versions + 2) * 4 * parameters * (2 if file.dcs.transport == "tcp" else 1)
        + SNAPSHOT_BUFFERS * 12 * trained,
    )


def _checkpoints(file: RunFile) -> int:
    """As many as there are on disk at the most."""
    keep = file.dcs.keep_checkpoints
    return keep.newest + keep.best + (file.run.steps // keep.every if keep.every else 0)


def _num_cpus(application: dict[str, Any]) -> float:
    deployments = application.get("deployments") or [{}]
    return float((deployments[0].get("ray_actor_options") or {}).get("num_cpus", 1))


def _check_space(file: RunFile, report: CheckReport, run_dir: Path) -> list[str]:
    problems = []
    while not run_dir.exists():
        run_dir = run_dir.parent
    for place, need in ((run_dir, report.disk_bytes), (Path(file.dcs.shm_dir), report.shm_bytes)):
        if not place.is_dir():
            problems.append(f"dcs.shm_dir: {place} is not a folder")
            continue
        free = shutil.disk_usage(place).free
        if free < need + file.dcs.reserve_bytes:
            problems.append(
                f"{place}: needs {need >> 20} MiB and a reserve of {file.dcs.reserve_bytes >> 20} MiB, "
                f"has {free >> 20} MiB: free some space or keep fewer checkpoints"
            )
    return problems


def describe(file: RunFile, report: CheckReport) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "run": file.run.name,
        "parameters": report.parameters,
        "steps": file.run.steps,
        "samples_per_step": file.run.groups_per_step * file.run.group_size,
        "admission_capacity_groups": (file.run.max_staleness + 1) * file.run.groups_per_step,
        "overdue": file.run.overdue_policy.value,
        "token_lag_bound": file.run.token_lag_bound,
        "worst_group_bytes": worst_group_bytes(file.run),
        "memory_bytes": report.memory_bytes,
        "placement": [
            {
                "role": item.role,
                "processes": item.processes,
                "num_cpus": item.num_cpus,
                "memory_bytes": item.memory_bytes,
                "note": item.note,
            }
            for item in report.placements
        ],
        "warnings": report.warnings,
    }


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=False)
