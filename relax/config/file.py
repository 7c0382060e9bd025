"""One run is one Serve YAML: each application's `args` are the shared `run` and the role's own section.

Loading is strict where Serve is lenient (Serve accepts unknown deployment keys and wrong deployment
names silently), so a file that passes here deploys as it is.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from relax.config.actor import ActorConfig
from relax.config.backends import backend_problems
from relax.config.base import StrictModel
from relax.config.data import FILE_KINDS, DataConfig
from relax.config.dump import step_ranges
from relax.config.roles import ControllerConfig, DcsConfig, RefConfig, RewardConfig, RolloutConfig
from relax.config.run import RunConfig
from relax.types import RelaxError


class ConfigError(RelaxError, ValueError):
    """The file cannot run; one message per line, each with the place and what to do."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class ControllerArgs(StrictModel):
    """Arguments of the controller application."""

    run: RunConfig
    """Shared facts."""
    controller: ControllerConfig = ControllerConfig()
    """Own section."""


class DcsArgs(StrictModel):
    """Arguments of the checkpoint service application."""

    run: RunConfig
    """Shared facts."""
    dcs: DcsConfig = DcsConfig()
    """Own section."""


class RolloutArgs(StrictModel):
    """Arguments of the rollout manager application."""

    run: RunConfig
    """Shared facts."""
    rollout: RolloutConfig
    """Own section."""


class RewardArgs(StrictModel):
    """Arguments of the reward application."""

    run: RunConfig
    """Shared facts."""
    reward: RewardConfig
    """Own section."""


class RefArgs(StrictModel):
    """Arguments of the reference application."""

    run: RunConfig
    """Shared facts."""
    ref: RefConfig = RefConfig()
    """Own section."""


class ActorArgs(StrictModel):
    """Arguments of the actor application."""

    run: RunConfig
    """Shared facts."""
    actor: ActorConfig = ActorConfig()
    """Own section."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    import_path: str
    deployment: str
    args: type[StrictModel]


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role("controller", "services.controller.app:build", "Controller", ControllerArgs),
        Role("dcs", "services.dcs.app:build", "Dcs", DcsArgs),
        Role("rollout", "services.rollout.app:build", "RolloutManager", RolloutArgs),
        Role("reward", "services.reward.app:build", "Reward", RewardArgs),
        Role("ref", "services.ref.app:build", "Ref", RefArgs),
        Role("actor", "services.actor.app:build", "Actor", ActorArgs),
    )
}

# Keys of Ray Serve 2.60's schema. Repeated here because the configuration package loads without Ray;
# a test compares them with the installed Serve.
TOP_KEYS = frozenset(
    """
    proxy_location http_options grpc_options controller_options logging_config tracing_config applications
    target_capacity
    """.split()
)
APPLICATION_KEYS = frozenset(
    """
    name route_prefix import_path runtime_env host port deployments autoscaling_policy args logging_config
    external_scaler_enabled
    """.split()
)
DEPLOYMENT_KEYS = frozenset(
    """
    name num_replicas max_ongoing_requests max_queued_requests backpressure_config user_config autoscaling_config
    graceful_shutdown_wait_loop_s graceful_shutdown_timeout_s health_check_period_s health_check_timeout_s
    ray_actor_options placement_group_bundles placement_group_strategy placement_group_bundle_label_selector
    max_replicas_per_node logging_config request_router_config gang_scheduling_config deployment_actors
    rolling_update_percentage max_surge_percent
    """.split()
)


TEACHER_PREFIX = "teacher-"
"""Deployments of the application `ref` beside Ref itself: one per teacher."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A validated file: `serve` is what Serve gets, the others are its typed sections."""

    serve: dict[str, Any]
    run: RunConfig
    controller: ControllerConfig
    dcs: DcsConfig
    rollout: RolloutConfig
    reward: RewardConfig | None
    ref: RefConfig | None
    actor: ActorConfig

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON."""
        sections: dict[str, BaseModel | None] = {
            "run": self.run,
            "controller": self.controller,
            "dcs": self.dcs,
            "rollout": self.rollout,
            "reward": self.reward,
            "ref": self.ref,
            "actor": self.actor,
        }
        return {name: model.model_dump(mode="json") for name, model in sections.items() if model is not None}


def load_run_file(path: Path, overrides: Iterable[str] = ()) -> RunFile:
    """Read, override (`section.key=value`, value in YAML) and validate. Raises `ConfigError`."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {error}"]) from error
    if not isinstance(document, dict):
        raise ConfigError([f"{path}: expected a mapping with the key 'applications'"])
    document = copy.deepcopy(document)  # anchors make the applications share one `run` object
    for override in overrides:
        apply_override(document, override)
    return parse_run_file(document, str(path))


def apply_override(document: dict[str, Any], override: str) -> None:
    """`run.*` goes to every application, `<role>.*` to that role, `serve.*` to the top level."""
    path, separator, text = override.partition("=")
    keys = path.split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError([f"--set {override}: expected section.key=value, e.g. run.steps=50"])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"--set {override}: the value is not valid YAML: {error}"]) from error
    section = keys[0]
    if section == "serve":
        _set(document, keys[1:], value, override)
        return
    if section != "run" and section not in ROLES:
        raise ConfigError([f"--set {override}: unknown section '{section}'{_nearest(section, ['run', *ROLES])}"])
    hit = False
    for application in document.get("applications") or []:
        args = application.get("args")
        if not isinstance(args, dict):
            continue
        if section == "run" or application.get("name") == section:
            application["args"] = args = copy.deepcopy(args)
            _set(args, keys, value, override)
            hit = True
    if not hit:
        raise ConfigError([f"--set {override}: the file has no application '{section}'"])


def _set(node: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError([f"--set {override}: '{key}' is not a mapping"])
        node = child
    node[keys[-1]] = value


def parse_run_file(document: dict[str, Any], where: str) -> RunFile:
    """Validate a loaded document. Raises `ConfigError` with every problem found."""
    problems = [f"{where}: {text}" for text in _serve_problems(document)]
    sections: dict[str, StrictModel] = {}
    for application in document.get("applications") or []:
        role = ROLES.get(str(application.get("name"))) if isinstance(application, dict) else None
        if role is None:
            continue
        try:
            sections[role.name] = role.args.model_validate(application.get("args") or {})
        except ValidationError as error:
            problems += [f"{where}: {text}" for text in _describe(error, role.name)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))

    args: dict[str, Any] = dict(sections)
    run: RunConfig = args["actor"].run
    for name, section in args.items():
        if section.run != run:
            differing = [key for key in RunConfig.model_fields if getattr(section.run, key) != getattr(run, key)]
            problems.append(
                f"{where}: application '{name}' has another 'run' than 'actor' (differs in {', '.join(differing)}): "
                "share one mapping by a YAML anchor (run: *run)"
            )
    file = RunFile(
        serve=document,
        run=run,
        controller=args["controller"].controller,
        dcs=args["dcs"].dcs,
        rollout=args["rollout"].rollout,
        reward=args["reward"].reward if "reward" in args else None,
        ref=args["ref"].ref if "ref" in args else None,
        actor=args["actor"].actor,
    )
    problems += [f"{where}: {text}" for text in cross_problems(file)]
    if problems:
        raise ConfigError(problems)
    return file


def _serve_problems(document: dict[str, Any]) -> list[str]:
    problems = _unknown(document, TOP_KEYS, "top level")
    applications = document.get("applications")
    if not isinstance(applications, list) or not applications:
        return [*problems, "'applications' must be a list with the roles"]
    names: list[str] = []
    for application in applications:
        if not isinstance(application, dict):
            problems.append("each entry of 'applications' must be a mapping")
            continue
        name = str(application.get("name"))
        names.append(name)
        problems += _unknown(application, APPLICATION_KEYS, f"application '{name}'")
        role = ROLES.get(name)
        if role is None:
            problems.append(f"unknown application '{name}'{_nearest(name, ROLES)}")
            continue
        if application.get("import_path") != role.import_path:
            problems.append(f"application '{name}': import_path must be '{role.import_path}'")
        for deployment in application.get("deployments") or []:
            place = f"deployment of '{name}'"
            problems += _unknown(deployment, DEPLOYMENT_KEYS, place)
            is_teacher = name == "ref" and str(deployment.get("name")).startswith(TEACHER_PREFIX)
            if deployment.get("name") != role.deployment and not is_teacher:
                problems.append(f"{place}: unknown name '{deployment.get('name')}', did you mean '{role.deployment}'?")
            if name not in ("reward", "ref") and deployment.get("num_replicas", 1) != 1:
                problems.append(f"{place}: num_replicas must be 1 (scale rollout by rollout.instances)")
    problems += [f"application '{name}' appears twice" for name in sorted({n for n in names if names.count(n) > 1})]
    required = [name for name in ROLES if name not in ("ref", "reward")]  # the others: see cross_problems
    problems += [f"application '{name}' is missing" for name in required if name not in names]
    return problems


def _unknown(mapping: Any, known: Iterable[str], place: str) -> list[str]:
    if not isinstance(mapping, dict):
        return [f"{place}: expected a mapping"]
    names = set(known)
    return [f"{place}: unknown key '{key}'{_nearest(str(key), names)}" for key in mapping if key not in names]


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean '{near[0]}'?" if near else f" (known: {', '.join(sorted(known))})"


def _describe(error: ValidationError, role: str) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        # The shared `run` is reported once, not once for each application; a section has its role's name.
        place = ".".join(str(part) for part in item["loc"]) or f"args of application '{role}'"
        lines.append(f"{place}: {item['msg'].removeprefix('Value error, ')}")
    return lines


def cross_problems(file: RunFile) -> list[str]:
    """Combinations across sections that would fail or mean nothing at run time."""
    run, rollout, actor = file.run, file.rollout, file.actor
    problems: list[str] = []
    algorithm = actor.algorithm
    wants_reference = algorithm.kl.coef > 0 or algorithm.objective == "dpo"
    has_reference = file.ref is not None and file.ref.reference
    if wants_reference and not (run.use_ref and has_reference):
        problems.append(
            "actor.algorithm.kl.coef > 0 and objective 'dpo' need the reference: set run.use_ref and ref.reference true"
        )
    if run.use_ref and has_reference and not wants_reference:
        problems.append(
            "run.use_ref is true but actor.algorithm.kl.coef is 0: nothing would read it "
            "(with teachers alone set ref.reference false)"
        )
    problems += _teacher_problems(file)
    if (algorithm.advantage == "gae") != (actor.critic is not None):
        problems.append("actor.critic goes with actor.algorithm.advantage 'gae' (preset ppo), and only with it")
    if run.groups_per_step % algorithm.mini_batches:
        problems.append("run.groups_per_step must be a multiple of actor.algorithm.mini_batches")
    if run.use_ref != (file.ref is not None):
        problems.append("the application 'ref' goes with run.use_ref true, and only with it")
    problems += _job_problems(file)
    problems += backend_problems(run, rollout, actor)
    if (
        run.group_size < 2
        and run.generates
        and algorithm.advantage in ("group_mean_std", "group_mean", "leave_one_out")
    ):
        problems.append(
            f"run.group_size must be at least 2: advantage '{algorithm.advantage}' compares a group's samples"
        )
    sampling = rollout.sampling
    if sampling.temperature <= 0 or sampling.top_p != 1.0 or sampling.top_k != -1:
        problems.append(
            "rollout.sampling: training needs temperature > 0, top_p 1 and top_k -1, because the trainer computes "
            "untruncated log-probs at the sampling temperature"
        )
    if actor.publish_dtype != rollout.engine.dtype:
        problems.append(
            f"actor.publish_dtype {actor.publish_dtype} differs from rollout.engine.dtype {rollout.engine.dtype}"
        )
    if rollout.min_group_size is not None and rollout.min_group_size > run.group_size:
        problems.append("rollout.min_group_size is larger than run.group_size")
    if actor.groups_per_lease is not None and actor.groups_per_lease > run.groups_per_step:
        problems.append("actor.groups_per_lease is larger than run.groups_per_step")
    if rollout.filter.kind == "accuracy_band" and rollout.filter.low >= rollout.filter.high:
        problems.append("rollout.filter.low must be below rollout.filter.high")
    if rollout.eval.prompts and rollout.eval.seed == run.seed and rollout.data.kind not in FILE_KINDS:
        problems.append("rollout.eval.seed must differ from run.seed, or the held-out prompts are trained on")
    if rollout.eval.prompts and rollout.eval.data is None and rollout.data.kind in (*FILE_KINDS, "mix"):
        problems.append(f"rollout.eval: data.kind '{rollout.data.kind}' has no held-out part; set rollout.eval.data")
    if rollout.eval.data is not None and rollout.eval.data.kind == "mix":
        problems.append("rollout.eval.data: a mix cannot be evaluated; name one source")
    if run.model.kind == "tiny_char" and rollout.data.kind == "reasoning_gym":
        problems.append("rollout.data: the character model has no tokenizer for reasoning-gym text; use a 'hf' model")
    if file.reward and file.reward.overlong and file.reward.overlong.buffer_tokens > run.max_response_tokens:
        problems.append("reward.overlong.buffer_tokens is larger than run.max_response_tokens")
    if actor.warm_start.steps and actor.warm_start.data is not None and actor.warm_start.data.epochs is not None:
        problems.append("actor.warm_start.data.epochs is not used: the warm start takes what its steps need")
    if actor.dump.steps and all(first > run.steps for first, _, _ in step_ranges(actor.dump.steps)):
        problems.append(f"actor.dump.steps {actor.dump.steps}: the run has {run.steps} steps, none would be recorded")
    worst = worst_group_bytes(run) * rollout.max_segments
    if worst > run.bus.max_bytes:
        problems.append(f"run.bus.max_bytes {run.bus.max_bytes} is less than one group at worst ({worst} bytes)")
    if run.group_size * rollout.max_segments + 1 > run.bus.max_rows:
        problems.append("run.bus.max_rows holds less than one group")
    if file.dcs.host in ("0.0.0.0", "::"):
        problems.append(f"dcs.host {file.dcs.host} is no address that an instance can reach: give one interface")
    if file.serve.get("http_options", {}).get("host", "127.0.0.1") in ("0.0.0.0", "::") and run.bus.host == "0.0.0.0":
        problems.append("run.bus.host 0.0.0.0 would expose an unauthenticated wire: give one private interface")
    return problems


def _teacher_problems(file: RunFile) -> list[str]:
    run, distill, routing = file.run, file.actor.algorithm.distill, file.rollout.teachers
    teachers = {} if file.ref is None else file.ref.teachers
    problems = []
    if (distill.coef > 0) != bool(teachers):
        problems.append("actor.algorithm.distill.coef > 0 goes with ref.teachers, and only with them")
    if (routing is not None) != bool(teachers):
        problems.append("rollout.teachers (the routing) goes with ref.teachers, and only with them")
    if file.ref is not None and not file.ref.reference and not teachers:
        problems.append("ref.reference is false and there are no teachers: leave the application 'ref' out")
    if (run.teacher_top_k > 0) != (distill.coef > 0 and distill.form != "sampled"):
        problems.append("run.teacher_top_k goes with actor.algorithm.distill.form 'topk_*', and only with it")
    if routing is not None:
        named = {*routing.routes.values(), *([routing.default] if routing.default else [])}
        problems += [
            f"rollout.teachers: unknown teacher '{name}'{_nearest(name, teachers)}" for name in named - set(teachers)
        ]
        if not named:
            problems.append("rollout.teachers names no teacher: give routes, or a default")
    return problems


def _job_problems(file: RunFile) -> list[str]:
    """Which roles and sizes go with the kind of job: engines that generate, or responses that the data holds."""
    run, objective = file.run, file.actor.algorithm.objective
    problems = []
    if run.generates == (file.reward is None):
        problems.append("the application 'reward' goes with run.responses 'generated', and only with it")
    if run.generates == (objective in ("sft", "dpo")):
        problems.append("run.responses 'recorded' goes with actor.algorithm.objective 'sft' or 'dpo', and only with it")
    if not run.generates:
        members = {"sft": 1, "dpo": 2}.get(objective)
        if members is not None and run.group_size != members:
            problems.append(
                f"run.group_size must be {members}: objective '{objective}' reads as many responses a prompt"
            )
        if file.rollout.eval.prompts or file.rollout.filter.kind != "none":
            problems.append("rollout.eval and rollout.filter need run.responses 'generated'")
        if file.rollout.data.kind in ("toy", "reasoning_gym") and objective == "dpo":
            problems.append("rollout.data: pairs for objective 'dpo' come from a file or an own class")
    return problems


def eval_data(rollout: RolloutConfig) -> DataConfig:
    """The held-out source: one of its own, or the held-out part of the training source."""
    return rollout.data if rollout.eval.data is None else rollout.eval.data


BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 4 + 4 + 4 + 4
"""tokens, loss_mask, rollout_logprobs, versions, ref_logprobs, proximal_logprobs, values, teacher_logprobs."""


def worst_group_bytes(run: RunConfig) -> int:
    """Bytes that one group takes in the bus at the most: every member at full length, all fields."""
    per_token = BYTES_PER_TOKEN + (4 + 4) * run.teacher_top_k
    return run.group_size * (run.max_tokens * per_token + 4096)
