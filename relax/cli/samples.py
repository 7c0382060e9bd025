"""`relax samples`: the generations of a run with their rewards, filtered, sorted, readable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from relax.cli.folders import known_name
from relax.telemetry.run_folder import RunFolder, read_lines
from relax.types import Json, Purpose, RewardState, group_of
from services.rollout.ledger import Ledger, TerminalState

Sample = Mapping[str, Json]
LONGEST_TEXT = 2000
"""Characters of a prompt or a response that are shown; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What a sample must be; None: no matter."""

    steps: tuple[int, int] | None = None
    group: str | None = None
    purpose: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    failed: bool = False

    def keep(self, sample: Sample) -> bool:
        return (
            (self.steps is None or _within(sample.get("step"), *self.steps))
            and (self.group is None or group_of(str(sample["row_id"])) == self.group)
            and (self.purpose is None or sample.get("purpose") == self.purpose)
            and (not self.failed or sample.get("reward_state") != RewardState.OK)
            and (
                (self.min_reward is None and self.max_reward is None)
                or _within(sample.get("reward"), self.min_reward, self.max_reward)
            )
        )


def _within(value: Json, low: float | None, high: float | None) -> bool:
    """False for a value that is missing."""
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _response_length(sample: Sample) -> float:
    return len(str(sample.get("response")))


PURPOSES = tuple(purpose.value for purpose in Purpose)

SORTS: Mapping[str, Callable[[Sample], float]] = {
    "reward": lambda sample: _number(sample.get("reward")),
    "accuracy": lambda sample: _number(sample.get("accuracy")),
    "version": lambda sample: _number(sample.get("version")),
    "step": lambda sample: _number(sample.get("step")),
    "length": _response_length,
}
"""By `--sort`; `-reward` begins with the largest. What a sample lacks comes first."""


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else -math.inf


def read_samples(folder: RunFolder) -> Iterator[Sample]:
    """In the order of their reports; `step` is the one that trained the sample, or None. Raises `RunFolderError`."""
    steps = trained_steps(folder.path / "ledger.sqlite")
    for sample in read_lines(folder.samples_path):
        yield {"step": steps.get(group_of(str(sample["row_id"]))), **sample}


def trained_steps(ledger: Path) -> dict[str, int]:
    """Group id -> the training step that took it; none where there is no ledger."""
    if not ledger.exists():
        return {}
    with Ledger(ledger, read_only=True) as opened:
        return {str(one.group_id): one.step for one in opened.terminals(TerminalState.TRAINED) if one.step is not None}


def select(samples: Iterable[Sample], filters: Filters, sort: str | None, limit: int) -> tuple[list[Sample], int]:
    """The samples to show, and how many there are in all. Raises `BadOption`."""
    found = [sample for sample in samples if filters.keep(sample)]
    if sort is not None:
        name = known_name("--sort", sort.removeprefix("-"), SORTS)
        found.sort(key=SORTS[name], reverse=sort.startswith("-"))
    return (found[:limit] if limit > 0 else found), len(found)


def render(samples: Sequence[Sample], total: int) -> RenderableType:
    if not samples:
        return Text("no sample matches", style="yellow")
    panels: list[RenderableType] = [_panel(sample) for sample in samples]
    shown = f"{len(samples)} of {total} samples" if len(samples) < total else f"{total} samples"
    return Group(*panels, Text(shown, style="dim"))


def _panel(sample: Sample) -> Panel:
    reward, state = sample.get("reward"), str(sample.get("reward_state"))
    failed = state != RewardState.OK
    facts = Text()
    facts.append(f"reward {state}" if failed or reward is None else f"reward {reward:g}", "red" if failed else "bold")
    facts.append("".join(f"  {name} {value:g}" for name, value in (sample.get("parts") or {}).items()), "dim")
    body = Group(
        Text.assemble(("prompt    ", "cyan"), _cut(sample.get("prompt"))),
        Text.assemble(("response  ", "cyan"), _cut(sample.get("response"))),
        Text.assemble(("label     ", "cyan"), _cut(sample.get("label"))),
        facts,
    )
    step = "not trained" if sample.get("step") is None else f"step {sample['step']}"
    if sample.get("purpose") != "train":
        step = str(sample.get("purpose"))
    title = Text(f"{sample['row_id']}  {step}  version {sample.get('version')}  {sample.get('finish_reason')}")
    return Panel(body, title=title, title_align="left", border_style="red" if failed else "dim")


def _cut(value: Json) -> str:
    text = str(value)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
