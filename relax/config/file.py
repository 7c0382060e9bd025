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

from relax.config.base import StrictModel
from relax.config.roles import (
    ActorConfig,
    ControllerConfig,
    DataConfig,
    DcsConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
)
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


@dataclass(frozen=True, slots=True)
class RunFile:
    """A validated file: `serve` is what Serve gets, the others are its typed sections."""

    serve: dict[str, Any]
    run: RunConfig
    controller: ControllerConfig
    dcs: DcsConfig
    rollout: RolloutConfig
    reward: RewardConfig
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
        reward=args["reward"].reward,
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
            if deployment.get("name") != role.deployment:
                problems.append(f"{place}: unknown name '{deployment.get('name')}', did you mean '{role.deployment}'?")
            if name not in ("reward", "ref") and deployment.get("num_replicas", 1) != 1:
                problems.append(f"{place}: num_replicas must be 1 (scale rollout by rollout.instances)")
    problems += [f"application '{name}' appears twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"application '{name}' is missing" for name in ROLES if name not in names and name != "ref"]
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
        # The shared `run` is reported once, not once for each application.
        path = item["loc"] if item["loc"][:1] == ("run",) else (role, *item["loc"])
        place = ".".join(str(part) for part in path)
        lines.append(f"{place}: {item['msg'].removeprefix('Value error, ')}")
    return lines


def cross_problems(file: RunFile) -> list[str]:
    """Combinations across sections that would fail or mean nothing at run time."""
    run, rollout, actor = file.run, file.rollout, file.actor
    problems: list[str] = []
    wants_ref = actor.algorithm.kl.coef > 0
    if wants_ref and not run.use_ref:
        problems.append("actor.algorithm.kl.coef > 0 needs the reference: set run.use_ref true")
    if run.use_ref and not wants_ref:
        problems.append("run.use_ref is true but actor.algorithm.kl.coef is 0: nothing would read it")
    if run.use_ref != (file.ref is not None):
        problems.append("the application 'ref' goes with run.use_ref true, and only with it")
    if run.group_size < 2:
        problems.append("run.group_size must be at least 2: a group's advantage compares its samples")
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
    if rollout.eval.prompts and rollout.eval.seed == run.seed and rollout.data.kind != "jsonl":
        problems.append("rollout.eval.seed must differ from run.seed, or the held-out prompts are trained on")
    if rollout.eval.prompts and (rollout.data.kind == "jsonl") != (rollout.eval.path is not None):
        problems.append("rollout.eval.path goes with data.kind 'jsonl', and only with it")
    if run.model.kind == "tiny_char" and rollout.data.kind == "reasoning_gym":
        problems.append("rollout.data: the character model has no tokenizer for reasoning-gym text; use a 'hf' model")
    if file.reward.overlong and file.reward.overlong.buffer_tokens > run.max_response_tokens:
        problems.append("reward.overlong.buffer_tokens is larger than run.max_response_tokens")
    if actor.warm_start.steps and actor.warm_start.data is not None and actor.warm_start.data.epochs is not None:
        problems.append("actor.warm_start.data.epochs is not used: the warm start takes what its steps need")
    worst = worst_group_bytes(run)
    if worst > run.bus.max_bytes:
        problems.append(f"run.bus.max_bytes {run.bus.max_bytes} is less than one group at worst ({worst} bytes)")
    if run.group_size + 1 > run.bus.max_rows:
        problems.append("run.bus.max_rows holds less than one group")
    if file.serve.get("http_options", {}).get("host", "127.0.0.1") in ("0.0.0.0", "::") and run.bus.host == "0.0.0.0":
        problems.append("run.bus.host 0.0.0.0 would expose an unauthenticated wire: give one private interface")
    return problems


def eval_data(rollout: RolloutConfig) -> DataConfig:
    """The held-out source: the training source with another seed, or the file of its own."""
    if rollout.eval.path is None:
        return rollout.data
    return rollout.data.model_copy(update={"path": rollout.eval.path})


BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 4 + 4
"""tokens, loss_mask, rollout_logprobs, versions, ref_logprobs, proximal_logprobs."""


def worst_group_bytes(run: RunConfig) -> int:
    """Bytes that one group takes in the bus at the most: every member at full length, all fields."""
    return run.group_size * (run.max_tokens * BYTES_PER_TOKEN + 4096)
