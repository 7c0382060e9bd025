"""Combinations across the sections of a file that would fail or mean nothing at run time."""

from __future__ import annotations

from relax.config.backends import backend_problems
from relax.config.base import nearest
from relax.config.data import FILE_KINDS, DataConfig
from relax.config.dump import step_ranges
from relax.config.roles import RolloutConfig
from relax.config.run import RunConfig
from relax.config.sections import RunFile


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
    if run.deterministic:
        problems += _chance(run, rollout)
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


def _chance(run: RunConfig, rollout: RolloutConfig) -> list[str]:
    """What leaves results to chance: which policy draws a sample, and which samples share a batch."""
    needed = {
        "run.max_staleness": (run.max_staleness, 0),
        "rollout.instances": (rollout.instances, 1),
        "rollout.engine.slots": (rollout.engine.slots, 1),
    }
    return [
        f"run.deterministic needs {key} {wanted}, not {value}"
        for key, (value, wanted) in needed.items()
        if value != wanted
    ]


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
            f"rollout.teachers: unknown teacher '{name}'{nearest(name, teachers)}" for name in named - set(teachers)
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
