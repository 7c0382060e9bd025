"""Which changes of its configuration a run that is resumed allows, and why. Pure.

Each key of a run file is classed, alone or with its whole section. What a key decides once (the model, the order of the
prompts, how a step is counted) cannot change: the state and the ledger of the run are made of it. What only decides how
the next step is made may.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax.config.base import StrictModel
from relax.config.run import RunConfig
from relax.config.sections import ROLES


@dataclass(frozen=True, slots=True)
class Rule:
    """`reason`: why a change is allowed, or what it would break."""

    allowed: bool
    reason: str


def _may(reason: str) -> Rule:
    return Rule(True, reason)


def _not(reason: str) -> Rule:
    return Rule(False, reason)


_NEXT = _may("counts from the next step on")
_PROCESSES = _may("services start anew, with other sizes or limits")
_SAMPLES = _may("samples are drawn and scored so from now on")
_ORDER = _not("the ledger's cursor counts the prompts of this source in this order")
_MODEL = _not("the checkpoint holds the weights and moments of this model")
_HELD_OUT = _not("evaluations before and after training are compared, prompt by prompt")
_WATCHES = _may("nothing that is trained depends on it")

RULES: Mapping[str, Rule] = {
    "run.name": _not("it names the run in memory, metrics and the bus"),
    "run.run_dir": _not("a run goes on in its own folder: to branch off, copy the folder and resume the copy"),
    "run.seed": _not("weights, order of the prompts and sampling follow from it"),
    "run.steps": _may("the run ends later or earlier; a decaying learning rate is stretched to the new end"),
    "run.groups_per_step": _not("steps are counted in groups: the ledger's steps would not be the trainer's"),
    "run.group_size": _may("groups that are generated from now on have as many samples"),
    "run.max_staleness": _NEXT,
    "run.deterministic": _may("steps are equal to the last bit from the next one on, or no longer"),
    "run.overdue": _NEXT,
    "run.max_token_lag": _NEXT,
    "run.group_deadline_s": _NEXT,
    "run.max_prompt_tokens": _not("which prompts are too long decides what the ledger's cursor counts"),
    "run.max_response_tokens": _SAMPLES,
    "run.responses": _not("recorded and generated responses are two kinds of job"),
    "run.use_ref": _may("the reference is policy version 0, which the run folder keeps"),
    "run.teacher_top_k": _SAMPLES,
    "run.model": _MODEL,
    "run.model.path": _may("for a folder that was moved: its tensors must be those of the checkpoint"),
    "run.model.trust_remote_code": _PROCESSES,
    "run.bus": _PROCESSES,
    "run.threads": _PROCESSES,
    "run.simulation": _may("a time model of a cluster"),
    "run.trace_share": _WATCHES,
    "run.faults": _WATCHES,
    "run.fault_points": _WATCHES,
    "controller": _WATCHES,
    "dcs": _may("weights are published anew at the start; retention counts from the next save on"),
    "rollout.instances": _PROCESSES,
    "rollout.instance_num_cpus": _PROCESSES,
    "rollout.instance_resources": _PROCESSES,
    "rollout.data": _ORDER,
    "rollout.data.epochs": _may("the cursor says which epoch it is in"),
    "rollout.sampling": _SAMPLES,
    "rollout.engine": _SAMPLES,
    "rollout.worker": _SAMPLES,
    "rollout.teachers": _SAMPLES,
    "rollout.filter": _may("groups are judged so from now on; those that were filtered stay so"),
    "rollout.min_group_size": _may("groups are judged so from now on"),
    "rollout.eval.prompts": _HELD_OUT,
    "rollout.eval.samples": _HELD_OUT,
    "rollout.eval.temperature": _HELD_OUT,
    "rollout.eval.seed": _HELD_OUT,
    "rollout.eval.data": _HELD_OUT,
    "rollout.eval.every": _NEXT,
    "rollout.eval.instances": _PROCESSES,
    "rollout.eval.deadline_s": _PROCESSES,
    "rollout.start_deadline_s": _PROCESSES,
    "rollout.adoption_deadline_s": _PROCESSES,
    "rollout.max_segments": _SAMPLES,
    "rollout.sample_retries": _SAMPLES,
    "reward": _SAMPLES,
    "ref": _PROCESSES,
    "ref.path": _not("the distance to the reference would be measured from another model"),
    "actor.backend": _not("the checkpoint holds the state of this backend"),
    "actor.algorithm": _NEXT,
    "actor.trainer": _NEXT,
    "actor.optim": _may("the moments are state, the settings are not: they count from the next step on"),
    "actor.critic": _not("the checkpoint holds a critic or holds none"),
    "actor.critic.path": _may("the critic is loaded from the checkpoint"),
    "actor.critic.optim": _NEXT,
    "actor.critic.value_clip": _NEXT,
    "actor.critic.warmup_steps": _NEXT,
    "actor.warm_start": _not("it came before the first step"),
    "actor.micro_batch_tokens": _may("gradients are sums over the step, however it is divided"),
    "actor.share_prompts": _may("the numbers stay the same up to rounding"),
    "actor.groups_per_lease": _NEXT,
    "actor.autocast_bf16": _NEXT,
    "actor.gradient_checkpointing": _NEXT,
    "actor.max_skipped_steps": _NEXT,
    "actor.publish_dtype": _may("weights are published anew at the start"),
    "actor.export": _NEXT,
    "actor.snapshot_every": _NEXT,
    "actor.checkpoint_every": _NEXT,
    "actor.dump": _WATCHES,
}
"""By key, or by a section for all keys in it that have no rule of their own. The rule of a section also says whether it
may come or go as a whole."""


@dataclass(frozen=True, slots=True)
class Change:
    """`before`, `after`: JSON; None where a section was or is not there."""

    key: str
    before: Any
    after: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.before)} -> {_short(self.after)}: {self.rule.reason}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What differs between two resolved configurations (`RunFile.resolved`). A key that only one of two mappings knows
    is one that another version of this program has added: it is passed over."""
    return [Change(key, was, now, rule_for(key)) for key, was, now in _differences("", before, after)]


def table() -> str:
    """The rules as a table in Markdown, for docs/resuming.md."""
    lines = ["| key | may it change | why |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{key}` | {'yes' if rule.allowed else 'no'} | {rule.reason} |" for key, rule in RULES.items())]
    )


def rule_for(key: str) -> Rule:
    """Raises `KeyError` for a key without a class."""
    section = key
    while section:
        if section in RULES:
            return RULES[section]
        section = section.rpartition(".")[0]
    raise KeyError(f"relax/config/resume.py does not say whether {key} may change when a run is resumed")


def known_keys() -> Iterator[tuple[str, bool]]:
    """Every key of a run file, and whether it is a section. Lists and mappings of sections are one key."""
    yield from _keys("run", RunConfig, ())
    for role in ROLES.values():
        section = typing.cast(type[StrictModel], _model_in(role.args.model_fields[role.name].annotation))
        yield role.name, True
        yield from _keys(role.name, section, ())


def _keys(path: str, model: type[StrictModel], above: tuple[type[StrictModel], ...]) -> Iterator[tuple[str, bool]]:
    for name, field in model.model_fields.items():
        key, inner = f"{path}.{name}", _model_in(field.annotation)
        yield key, inner is not None
        if inner is not None and inner not in above:
            yield from _keys(key, inner, (*above, model))


def _model_in(annotation: Any) -> type[StrictModel] | None:
    """The section that a field is, or may be; None for values, and for lists and mappings of whatever."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, StrictModel):
            return option
    return None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _differences(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    for name in before:
        if name not in after:
            if not path:  # a whole role
                yield name, before[name], None
            continue
        key, was, now = f"{path}.{name}" if path else name, before[name], after[name]
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict) and key in _SECTIONS:
            yield from _differences(key, was, now)
        else:
            yield key, was, now
    if not path:
        yield from ((name, None, after[name]) for name in after if name not in before)


_SECTIONS = {"run"} | {key for key, is_section in known_keys() if is_section}


def _short(value: Any, limit: int = 60) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= limit else f"{text[:limit]} ..."


if __name__ == "__main__":
    print(table())
