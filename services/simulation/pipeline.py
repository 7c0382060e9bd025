"""A whole run on the simulated clock: the real admission and the real bus index between modelled engines and trainer.

manager ─admit→ Index ─lease→ SimEngine ─put→ Index ─lease→ trainer ─commit→ Index, admission, engines
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bus.index import Index
from bus.index import Limits as BusLimits
from bus.records import (
    AdmitHeader,
    Caller,
    EventKind,
    Grant,
    LeaseRequest,
    RowHeader,
    Scalar,
    TrainedStep,
    Verdict,
    VerdictKind,
)
from relax.config.run import RunConfig
from relax.config.simulation import EngineModelConfig, SimulationConfig
from relax.control.admission import AdmissionState, Limits, hold_below
from relax.simulation.clock import Clock
from relax.simulation.engine import Sample, SimEngine
from relax.simulation.turns import Figures, Lengths, colocated
from relax.types import GroupId, PolicyVersion, Purpose

FIELDS = ("tokens", "reward")
_DIGEST = b"simulated"
LEASE_S = 1e9
"""Nobody dies here, so no lease expires."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mode beside its limit. limit_s: the longer of generating and of training a step, each measured with the
    other taking no time; for `colocate` there is none, as nothing overlaps."""

    step_s: float
    limit_s: float | None
    trainer_wait_share: float
    lag_histogram: dict[int, int]

    @property
    def over_limit(self) -> float | None:
        return None if self.limit_s is None else self.step_s / self.limit_s


NO_TIME = 1e-3
"""Scale of a side that takes next to no time."""


def outcome(run: RunConfig, config: SimulationConfig) -> Outcome:
    warm = config.warm_steps
    if config.mode == "colocate":
        figures, limit_s = colocated(run, config), None
    else:
        figures = Pipeline(run, config).run()
        rollout = Pipeline(run, config, train_scale=NO_TIME).run().mean_step_s(warm)
        train = Pipeline(run, config, rollout_scale=NO_TIME).run().mean_step_s(warm)
        limit_s = max(rollout, train)
    return Outcome(figures.mean_step_s(warm), limit_s, figures.wait_share(warm), dict(sorted(figures.lags.items())))


def simulate(run: RunConfig, config: SimulationConfig) -> Figures:
    return colocated(run, config) if config.mode == "colocate" else Pipeline(run, config).run()


class Pipeline:
    """Mode `async`. `train_scale` and `rollout_scale` stretch one side, for the limits and for sweeps."""

    def __init__(
        self, run: RunConfig, config: SimulationConfig, *, train_scale: float = 1.0, rollout_scale: float = 1.0
    ) -> None:
        self.run_config, self.config = run, config
        self.clock, self.lengths, self.figures = Clock(), Lengths(run, config), Figures()
        self.train_scale, self.rollout_scale = train_scale, rollout_scale
        self.admission = AdmissionState(Limits.from_run(run))
        samples = run.groups_per_step * run.group_size * (2 * run.max_staleness + 4)
        limits = BusLimits(
            max_rows=4 * samples,
            max_bytes=1 << 60,
            retained_max_bytes=1 << 60,
            max_tokens=run.max_tokens,
            bytes_per_token=1,
            fixed_bytes=1,
            lease_ttl_s=LEASE_S,
            max_deliveries=5,
            partition_rows=8192,
        )
        self.index = Index(limits, "simulated")
        self.callers: dict[str, Caller] = {}
        self.engines = [
            SimEngine(self.clock, self._engine_config(), lambda sample, n=n: self._finished(n, sample))  # type: ignore[misc]
            for n in range(config.rollout_gpus)
        ]
        for owner in ("manager", "actor", *(f"rollout-{n}" for n in range(len(self.engines)))):
            self.callers[owner] = self.index.register(owner, 0.0)
        self._slots, self._names, self._groups = itertools.count(), itertools.count(), itertools.count()
        self._leases: dict[str, tuple[str, int]] = {}
        self._event = 0
        self._group_lengths: dict[str, list[int]] = {}
        self._lag_of: dict[str, Counter[int]] = {}
        self._trainer = self._train()
        self._waiting_since: float | None = None

    def _engine_config(self) -> EngineModelConfig:
        scale, engine = self.rollout_scale, self.config.engine
        names = ("step_s", "sequence_s", "cached_token_s", "prefill_token_s")
        return engine.model_copy(update={name: getattr(engine, name) * scale for name in names})

    def run(self) -> Figures:
        self._admit()
        next(self._trainer)
        self.clock.run(lambda: len(self.figures.step_s) >= self.run_config.steps)
        return self.figures

    # ---- manager

    def _admit(self) -> None:
        headers = []
        while self.admission.capacity > 0:
            number = next(self._groups)
            group_id = GroupId(f"s:0:{number}")
            version = self.admission.admit(group_id, self.clock.now)
            self._group_lengths[group_id] = self.lengths.of_group(number, self.run_config.group_size)
            spec = AdmitHeader(group_id, number, self.run_config.group_size, version, "train", 1, {}, False)
            headers.append(RowHeader(group_id, group_id, (("prompt", _DIGEST, 1),), {}, spec))
        if headers:
            self._put("manager", headers, None)
            self._feed()

    def _put(self, owner: str, rows: list[RowHeader], lease_id: str | None) -> None:
        name = f"p{next(self._names)}"
        plan = self.index.plan_put(
            self.callers[owner], name, tuple(rows), lease_id, False, self.clock.now, lambda _: next(self._slots)
        )
        if plan is None:
            raise RuntimeError("the simulated bus has no room")
        self.index.commit_put(self.callers[owner], plan.put_id, self.clock.now)

    def _judge(self) -> None:
        events = self.index.events(self.callers["manager"], self._event, self.clock.now)
        verdicts = []
        for event in events:
            self._event = event.seq
            if event.kind is EventKind.COMPLETE:
                self.admission.mark_complete(GroupId(event.group_id))
                verdicts.append(Verdict(event.group_id, VerdictKind.ACCEPTED))
            elif event.kind is EventKind.DROPPED:
                self.admission.mark_dropped(GroupId(event.group_id), str(event.reason))
                self.figures.dropped[str(event.reason)] += 1
        if verdicts:
            self.index.judge(self.callers["manager"], tuple(verdicts), self.clock.now)

    # ---- engines

    def _feed(self) -> None:
        """Group by group to the engine with the most room, as engines that poll side by side share them."""
        while True:
            emptiest = max(range(len(self.engines)), key=lambda n: self.engines[n].free)
            if self.engines[emptiest].free < self.run_config.group_size or not self._lease(emptiest):
                return

    def _lease(self, number: int) -> bool:
        engine, owner = self.engines[number], f"rollout-{number}"
        request = LeaseRequest(
            "rollout", ("prompt",), lease_id=f"l{next(self._names)}", version=PolicyVersion(engine.version)
        )
        grant = self.index.lease(self.callers[owner], request, self.clock.now)
        if not isinstance(grant, Grant):
            return False
        for group in grant.groups:
            lengths = self._group_lengths.pop(group.group_id)
            prompt = self.config.lengths.prompt_tokens
            self._leases[group.group_id] = (grant.lease_id, len(lengths))
            engine.start([Sample(group.group_id, k, n, prompt) for k, n in enumerate(lengths)], prompt)
        return True

    def _finished(self, number: int, sample: Sample) -> None:
        owner = f"rollout-{number}"
        row_id = f"{sample.group_id}/{sample.k}/0"
        tags: dict[str, Scalar] = {
            "tokens": sample.length,
            "reward": float(sample.k % 2),
            "accuracy": float(sample.k % 2),
            "oldest_version": min(sample.tokens_by_version),
        }
        fields = tuple((name, _DIGEST, sample.length) for name in FIELDS)
        lease_id, left = self._leases[sample.group_id]
        self._lag_of[row_id] = sample.tokens_by_version
        self._put(owner, [RowHeader(row_id, sample.group_id, fields, tags)], lease_id)
        self._leases[sample.group_id] = (lease_id, left - 1)
        if left == 1:
            self.index.ack(self.callers[owner], lease_id, None, None, self.clock.now)
            del self._leases[sample.group_id]
            self._judge()
            self._wake()
        self.clock.after(0.0, self._feed)

    # ---- trainer

    def _wake(self) -> None:
        if self._waiting_since is not None:
            self.clock.after(0.0, lambda: next(self._trainer, None))

    def _train(self) -> Iterator[None]:
        """A coroutine over the clock: yields where it waits, and is resumed by the event it waits for."""
        run, trainer = self.run_config, self.config.trainer
        gpus = self.config.gpus - self.config.rollout_gpus
        for step in range(run.steps):
            begin, waited, tokens = self.clock.now, 0.0, 0
            leases: list[str] = []
            groups: list[str] = []
            while len(groups) < run.groups_per_step:
                grant = self._lease_groups(step, run.groups_per_step - len(groups))
                if grant is None:
                    self._waiting_since = self.clock.now
                    yield
                    if self._waiting_since is not None:
                        waited += self.clock.now - self._waiting_since
                        self._waiting_since = None
                    continue
                leases.append(grant.lease_id)
                groups += [group.group_id for group in grant.groups]
                amount = sum(row.tags["tokens"] for row in grant.rows if isinstance(row.tags["tokens"], int))
                tokens += amount
                for row in grant.rows:
                    for version, count in self._lag_of.pop(row.row_id).items():
                        self.figures.lags[step - version] += round(count)
                yield from self._busy(self.train_scale * amount * trainer.token_gpu_s / gpus)
            yield from self._busy(self.train_scale * trainer.update_s)
            version = PolicyVersion(step + 1)
            trained = TrainedStep(step + 1, version, dict.fromkeys(groups, run.group_size))
            self.index.commit_step(self.callers["actor"], trained, self.clock.now)
            self.index.gc(self.callers["actor"], step + 1, self.clock.now)
            self._free()
            self.admission.step_committed(version, [GroupId(group) for group in groups])
            self.clock.after(trainer.publish_s, lambda version=version: self._publish(version))  # type: ignore[misc]
            self._judge()
            self._admit()
            self.figures.step_s.append(self.clock.now - begin)
            self.figures.trainer_wait_s.append(waited)
            self.figures.tokens.append(tokens)

    def _busy(self, seconds: float) -> Iterator[None]:
        ended: list[bool] = []

        def end() -> None:
            ended.append(True)
            next(self._trainer, None)

        self.clock.after(seconds, end)
        while not ended:
            yield

    def _lease_groups(self, step: int, left: int) -> Grant | None:
        run = self.run_config
        version = PolicyVersion(step)
        request = LeaseRequest(
            task="actor",
            fields=FIELDS,
            lease_id=f"l{next(self._names)}",
            max_items=1,
            purposes=(Purpose.TRAIN,),
            version=version,
            max_token_lag=run.token_lag_bound,
            slots_left=left,
            groups_per_step=run.groups_per_step,
            hold_below=hold_below(version, run.max_staleness, run.overdue_policy),
        )
        grant = self.index.lease(self.callers["actor"], request, self.clock.now)
        return grant if isinstance(grant, Grant) else None

    def _free(self) -> None:
        self.index.freed(self.index.take_garbage())

    def _publish(self, version: PolicyVersion) -> None:
        for engine in self.engines:
            engine.take(int(version))
        self._feed()
