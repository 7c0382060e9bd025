"""The controller's account of the run: who reported what, and what follows. No I/O, no clock of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bus.records import PROMPTS, SAMPLES, BusStats
from relax.config.recovery import RecoveryConfig
from relax.config.sections import ControllerArgs
from relax.control.detection import ProgressTimes, ReplicaHealth, Throughput, silence_limit_s
from relax.control.lifecycle import FINAL, InstanceState
from relax.control.stopping import Hearing
from relax.control.watchdog import BusSnapshot, LeaseSnapshot, RoleSnapshot
from services import names
from services.controller.api import AdoptionReport, EvalReport, Heartbeat, RoleView
from services.controller.pace import Pace
from services.controller.store import ReplicaRow

ADOPTION_ATTEMPTS = 10
"""Failed adoptions of an instance that has never held weights, after which it counts as unable to."""

SILENT_BEATS = 5.0
"""Heartbeats that a replica may miss before the end of the run does not wait for it. The trainer has something to lose:
it is waited for until it counts as lost."""

_TOTALS = (
    "adoption_count digest_failures gap_max gap_mean asked_restarts bus_restarts instances_lost sample_reports "
    "_engine_busy_s _groups_ended"
).split()
REWARD_COUNTERS = ("reward_calls", "reward_failures", "reward_retries", "reward_worker_restarts")


def bus_snapshot(stats: BusStats, now: float) -> BusSnapshot:
    """The bus as the watchdog reads it."""
    return BusSnapshot(
        rows={PROMPTS: stats.open_groups, SAMPLES: stats.account.queued},
        ready=stats.ready,
        leases=[LeaseSnapshot(held.task, held.owner, held.items, now - held.age_s) for held in stats.held],
        closed=frozenset(stats.closed),
    )


def _cannot_adopt(beat: Heartbeat) -> bool:
    return "version" not in beat.facts and beat.counters.get("adoptions_failed", 0) >= ADOPTION_ATTEMPTS


def _add_to(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


_WORK_COUNTERS = ("rows", "samples", "steps", "groups_trained", "groups_filtered")
_ENGINES = (names.INSTANCE, names.EVALUATOR)
_FINAL_STATES = frozenset(state.value for state in FINAL)


@dataclass(slots=True)
class ReplicaAccount:
    """One role or instance over its restarts. `retired`: taken away for good; its totals stay."""

    beat: Heartbeat
    seen_at: float
    progress_at: float
    restarts: int = 0
    past_split: dict[str, float] = field(default_factory=dict)
    past_counters: dict[str, float] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    times: ProgressTimes = field(default_factory=ProgressTimes)
    throughput: Throughput = field(default_factory=Throughput)
    retired: bool = False

    def overtaken(self, beat: Heartbeat) -> bool:
        """It was held up: a later one of this replica, or its successor, was heard already."""
        if beat.replica_id == self.beat.replica_id:
            return beat.number < self.beat.number
        return beat.started_s < self.beat.started_s

    def update(self, beat: Heartbeat, now: float, straggler_window_s: float) -> None:
        if beat.replica_id != self.beat.replica_id:
            self.restarts += 1
            _add_to(self.past_split, self.beat.time_split)
            _add_to(self.past_counters, self.beat.counters)
            self.pace, self.times, self.throughput = Pace(), ProgressTimes(), Throughput()
            self.progress_at = now
        elif beat.counters != self.beat.counters or beat.state != self.beat.state:
            self.progress_at = now
            self.times.moved(now)
        self.beat, self.seen_at = beat, now
        self.observe(now, straggler_window_s)

    def observe(self, now: float, straggler_window_s: float) -> None:
        self.pace.observe(self.beat.time_split, self.beat.counters.get("tokens", 0.0))
        if self.beat.waiting_for:
            self.times.waits()
        else:
            self.times.works(now)
        if self.beat.role == names.INSTANCE:
            tokens, request_s = self.beat.counters.get("tokens", 0.0), float(self.beat.facts.get("request_s", 0.0))
            self.throughput.observe(now, tokens, request_s, straggler_window_s)

    def health(self, now: float, alive: Callable[[Heartbeat], bool]) -> ReplicaHealth:
        beat = self.beat
        return ReplicaHealth(
            role=beat.role,
            instance=beat.instance,
            replica_id=beat.replica_id,
            state=beat.state,
            silent_s=now - self.seen_at,
            still_s=self.times.still_s(now),
            median_s=self.times.median_s(),
            gone=not alive(beat),
            error=beat.error,
        )

    def has_worked(self) -> bool:
        """Since its start; who serves others shows that by living."""
        return self.beat.role == names.DCS or any(self.beat.counters.get(name, 0.0) > 0 for name in _WORK_COUNTERS)

    def to_row(self) -> ReplicaRow:
        beat = self.beat
        account = {
            "beat": asdict(beat),
            "past_split": dict(self.past_split),
            "past_counters": dict(self.past_counters),
            "retired": self.retired,
        }
        return ReplicaRow(
            beat.instance, beat.role, beat.replica_id, beat.pid, beat.started_s, beat.node, self.restarts, account
        )

    @classmethod
    def from_row(cls, row: ReplicaRow, now: float) -> ReplicaAccount:
        """Its silence begins now: nobody listened before."""
        kept = row.account
        beat = Heartbeat(**kept["beat"])
        return cls(
            beat, now, now, row.restarts, kept["past_split"], kept["past_counters"], retired=bool(kept["retired"])
        )

    def counter(self, name: str) -> float:
        """Since the start of the run, over restarts."""
        return self.past_counters.get(name, 0.0) + self.beat.counters.get(name, 0.0)

    def time_split(self) -> dict[str, float]:
        kinds = {**self.past_split, **self.beat.time_split}
        return {kind: self.past_split.get(kind, 0.0) + self.beat.time_split.get(kind, 0.0) for kind in kinds}


@dataclass(slots=True)
class RunBook:
    """Times are monotonic seconds given by the caller."""

    args: ControllerArgs
    started_at: float
    replicas: dict[str, ReplicaAccount] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    adoptions: dict[str, AdoptionReport] = field(default_factory=dict)
    adoption_count: int = 0
    digest_failures: int = 0
    gap_max: float = 0.0
    gap_mean: float = 0.0
    evals: dict[str, EvalReport] = field(default_factory=dict)
    asked_restarts: int = 0
    bus_restarts: int = 0
    instances_lost: int = 0
    """Instances that were taken away because they had failed."""
    sample_reports: dict[str, int] = field(default_factory=dict)
    """Replica -> number of its last report of samples: a repeated one is known by it."""
    _engine_busy_s: float = 0.0
    _groups_ended: dict[str, float] = field(default_factory=dict)

    # ------------------------------------------------------------------ over a restart of the controller

    def rows(self) -> list[ReplicaRow]:
        return [account.to_row() for account in self.replicas.values()]

    def totals(self) -> dict[str, Any]:
        """What is neither in the replicas' rows nor in a file of the run folder, as JSON."""
        kept = {name: copy.copy(getattr(self, name)) for name in _TOTALS}
        kept["adoptions"] = {name: asdict(report) for name, report in self.adoptions.items()}
        kept["evals"] = {when: asdict(report) for when, report in self.evals.items()}
        return kept

    def restore(
        self,
        rows: Sequence[ReplicaRow],
        totals: Mapping[str, Any] | None,
        steps: Sequence[dict[str, float]],
        now: float,
    ) -> None:
        """`steps`: of metrics.jsonl, whose lines are the truth about which steps were taken."""
        self.replicas = {row.instance: ReplicaAccount.from_row(row, now) for row in rows}
        self.steps = list(steps)
        if totals is None:
            return
        for name in _TOTALS:
            setattr(self, name, totals[name])
        self.adoptions = {name: AdoptionReport(**report) for name, report in totals["adoptions"].items()}
        self.evals = {
            when: EvalReport(
                **{
                    **report,
                    "accuracy": tuple(report["accuracy"]),
                    "pass_at": {int(k): value for k, value in report["pass_at"].items()},
                }
            )
            for when, report in totals["evals"].items()
        }

    def forgive(self, seconds: float) -> None:
        """Nobody listened for so long: nobody's silence."""
        for account in self.replicas.values():
            account.seen_at += seconds

    # ------------------------------------------------------------------ what is reported

    @property
    def recovery(self) -> RecoveryConfig:
        return self.args.controller.recovery

    def living(self) -> list[ReplicaAccount]:
        return [account for account in self.replicas.values() if not account.retired]

    def manager_facts(self) -> dict[str, Any]:
        """Of the rollout manager's last heartbeat: `instances` with their states, and which are for `training`."""
        account = self.replicas.get(names.ROLLOUT)
        return account.beat.facts if account is not None else {}

    def expected_roles(self) -> list[str]:
        roles = [names.DCS, names.ROLLOUT, names.ACTOR]
        roles += [names.REWARD] if self.args.run.generates else []
        return [*roles, names.REF] if self.args.run.use_ref else roles

    def record_beat(self, beat: Heartbeat, now: float) -> None:
        account = self.replicas.get(beat.instance)
        if account is None:
            account = self.replicas[beat.instance] = ReplicaAccount(beat, now, now)
            account.observe(now, self.recovery.straggler_window_s)
        elif not account.overtaken(beat):
            account.update(beat, now, self.recovery.straggler_window_s)
        if beat.role == names.ROLLOUT:
            self._retire(beat.facts.get("instances", {}))

    def _retire(self, instances: Mapping[str, Any]) -> None:
        """Instances that their manager has taken away for good."""
        for name, told in instances.items():
            account = self.replicas.get(name)
            if account is not None and not account.retired and told["state"] in _FINAL_STATES:
                account.retired = True
                self.instances_lost += told["state"] == InstanceState.FAILED.value

    def retire_unknown(self, now: float) -> None:
        """Silent instances that the manager knows nothing of: an earlier manager took them away."""
        known = self.manager_facts().get("instances")
        if not known:
            return
        for name, account in self.replicas.items():
            silent = now - account.seen_at > silence_limit_s(account.beat.role, self.recovery)
            if account.beat.role in _ENGINES and name not in known and silent:
                account.retired = True

    def record_adoption(self, report: AdoptionReport) -> None:
        self.adoptions[report.instance] = report
        self.adoption_count += 1
        self.digest_failures += not report.digest_ok
        self.gap_max = max(self.gap_max, report.gap_max)
        self.gap_mean = max(self.gap_mean, report.gap_mean)

    def has_step(self, record: Mapping[str, float]) -> bool:
        """It was recorded before: a report may be repeated."""
        return bool(self.steps) and record["step"] <= self.steps[-1]["step"]

    def record_step(self, record: dict[str, float]) -> bool:
        """False when this step was recorded before: a report may be retried."""
        if self.has_step(record):
            return False
        self.steps.append(record)
        return True

    def fatal(self) -> str | None:
        """The first reason to end the run: a log-prob gap above its limit (B8), a role's own, or weights that
        no instance can adopt (B4)."""
        limit = self.args.controller.logprob_gap_limit
        if limit is not None and self.gap_max > limit:
            return (
                f"log-prob gap {self.gap_max:.3g} between trainer and engine at equal version is above "
                f"controller.logprob_gap_limit {limit:g}: they do not compute the same model"
            )
        for account in self.living():
            if account.beat.fatal:
                return f"{account.beat.instance}: {account.beat.fatal}"
        instances = [account.beat for account in self.living() if account.beat.role == names.INSTANCE]
        if instances and all(_cannot_adopt(beat) for beat in instances):
            errors = sorted({str(beat.facts.get("adoption_error")) for beat in instances})
            return f"no rollout instance could adopt weights in {ADOPTION_ATTEMPTS} attempts: {'; '.join(errors)}"
        return None

    def unable_to_adopt(self) -> list[str]:
        """Instances that have never held weights and failed often enough; `fatal` has the case that all have."""
        return [
            account.beat.instance
            for account in self.living()
            if account.beat.role == names.INSTANCE and _cannot_adopt(account.beat)
        ]

    def missing(self) -> list[str]:
        """What has not come up: roles that are silent or still starting, and an instance that holds weights."""
        states = {account.beat.role: account.beat.state for account in self.replicas.values()}
        missing = [role for role in self.expected_roles() if states.get(role, "starting") == "starting"]
        instances = [account.beat for account in self.living() if account.beat.role == names.INSTANCE]
        if self.args.run.generates and not any("version" in beat.facts for beat in instances):
            errors = {str(beat.facts["adoption_error"]) for beat in instances if "adoption_error" in beat.facts}
            missing.append("a rollout instance with weights" + "".join(f" ({error})" for error in sorted(errors)))
        return missing

    def all_done(self) -> bool:
        """The last step is committed, the last group settled, the last sample scored and reported."""
        for role in (names.ACTOR, names.ROLLOUT, *([names.REWARD] if self.args.run.generates else [])):
            states = [account.beat.state for account in self.living() if account.beat.role == role]
            if not states or any(state != "done" for state in states):
                return False
        return True

    def restarts(self) -> int:
        replaced = sum(account.restarts for account in self.replicas.values())
        return replaced + self.instances_lost - self.asked_restarts

    def lost(self, now: float) -> list[str]:
        limit = self.args.controller.heartbeat_timeout_s
        return [account.beat.instance for account in self.living() if now - account.seen_at > limit]

    def health(self, now: float, alive: Callable[[Heartbeat], bool]) -> list[ReplicaHealth]:
        """`alive`: whether a replica's process is still there, or cannot be seen."""
        return [account.health(now, alive) for account in self.living()]

    def token_rates(self) -> dict[str, float | None]:
        """Training instances that generate -> tokens/s of one running request, over the stragglers' window."""
        window_s = self.recovery.straggler_window_s
        return {
            account.beat.instance: account.throughput.rate(window_s)
            for account in self.living()
            if account.beat.role == names.INSTANCE and account.beat.state == "active"
        }

    def in_flight(self, now: float) -> dict[str, dict[str, float]]:
        """By role: what it says that it has begun and not ended. Only replicas that are heard of count."""
        lost = set(self.lost(now))
        found: dict[str, dict[str, float]] = {}
        for account in self.living():
            if account.beat.instance in lost:
                continue
            for what in ("running", "waiting", "reports_waiting"):
                amount = float(account.beat.facts.get(what, 0.0))
                if amount:
                    of_role = found.setdefault(account.beat.role, {})
                    of_role[what] = of_role.get(what, 0.0) + amount
        return found

    def hearings(self, now: float) -> list[Hearing]:
        """Who has heard that the run ends."""
        limits = {
            True: self.args.controller.heartbeat_timeout_s,
            False: SILENT_BEATS * self.args.controller.heartbeat_s,
        }
        return [
            Hearing(
                trains=(trains := account.beat.role == names.ACTOR),
                state="failed" if account.beat.error else account.beat.state,
                stopping=account.beat.stopping,
                silent=now - account.seen_at > limits[trains],
            )
            for account in self.replicas.values()
        ]

    def last_progress_at(self) -> float:
        return max((account.progress_at for account in self.replicas.values()), default=self.started_at)

    def views(self, now: float) -> list[RoleView]:
        lost = set(self.lost(now))
        return [
            RoleView(
                role=account.beat.role,
                instance=name,
                state="lost" if name in lost else account.beat.state,
                waiting_for=account.beat.waiting_for,
                pid=account.beat.pid,
                node=account.beat.node,
                heartbeat_age_s=round(now - account.seen_at, 3),
                progress_age_s=round(now - account.progress_at, 3),
                restarts=account.restarts,
                version=account.beat.facts.get("version"),
                counters=account.beat.counters,
                time_split=account.time_split(),
                error=account.beat.error,
            )
            for name, account in sorted(self.replicas.items())
            if not account.retired
        ]

    def role_time(self) -> dict[str, dict[str, float]]:
        """Seconds by kind for each role; the instances of one role are added up."""
        total: dict[str, dict[str, float]] = {}
        for account in self.replicas.values():
            split = total.setdefault(account.beat.role, {})
            for kind, seconds in account.time_split().items():
                split[kind] = split.get(kind, 0.0) + seconds
        return total

    def snapshots(self) -> list[RoleSnapshot]:
        """For the watchdog; DCS and the manager wait for others by design, so only movers count."""
        return [
            RoleSnapshot(
                role="rollout" if account.beat.role == "instance" else account.beat.role,
                replica=name,
                last_progress_at_s=account.progress_at,
                state=(account.beat.waiting_for and f"waits for {account.beat.waiting_for}") or account.beat.state,
                counters=account.beat.counters,
            )
            for name, account in self.replicas.items()
            if not account.retired
        ]

    def counter(self, role: str, name: str) -> float:
        """A counter of all replicas of a role, since the start of the run."""
        return sum(account.counter(name) for account in self.replicas.values() if account.beat.role == role)

    def instance_means(self, name: str) -> float:
        """Mean of one fact over the rollout instances; 0 without any."""
        values = [
            float(account.beat.facts.get(name, 0.0)) for account in self.living() if account.beat.role == names.INSTANCE
        ]
        return sum(values) / len(values) if values else 0.0

    def complete_record(self, record: dict[str, float], bus: dict[str, Any]) -> dict[str, float]:
        """Join a step's record with what only the controller knows at that moment."""
        joined = dict(record)
        joined["logprob_gap_max"] = max((report.gap_max for report in self.adoptions.values()), default=0.0)
        joined["logprob_gap_mean"] = max((report.gap_mean for report in self.adoptions.values()), default=0.0)
        for name in ("produced", "trained", "dropped", "queued"):
            joined[name] = float(bus.get(name, 0))
        joined["bus_rows"] = float(bus.get("rows", 0))
        joined["bus_bytes"] = float(bus.get("bytes", 0))
        busy_s = self.instance_means("busy_s")
        joined["engine_busy_s"] = max(0.0, busy_s - self._engine_busy_s)  # a restarted engine counts from 0
        self._engine_busy_s = busy_s
        for name in ("groups_filtered", "groups_dropped"):
            ended = self.counter(names.ROLLOUT, name)
            joined[name] = ended - self._groups_ended.get(name, 0.0)
            self._groups_ended[name] = ended
        if self.args.run.generates:
            joined |= {name: self.counter(names.REWARD, name) for name in REWARD_COUNTERS}
        return joined
