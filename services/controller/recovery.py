"""Carries out the recovery table: a finding becomes an incident, a decision, and an operation with its steps.

    tick ─▶ find_faults ─▶ decide (relax/control/recovery.py) ─▶ operation: back-off ─▶ act ─▶ its successor is up

One operation per replica at a time; what it does not achieve within `recovery.start_s` is a fault again, of the next
weight. During a global recovery nothing else is begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ray.exceptions import RayError

from relax.config.recovery import RecoveryConfig
from relax.control.detection import Finding, find_faults, find_stragglers, silence_limit_s
from relax.control.lifecycle import InstanceState
from relax.control.operations import Incident, OperationState
from relax.control.recovery import RUN, Action, Attempt, Decision, Fault, decide
from relax.types import RelaxError
from services import names
from services.controller import serve_apps
from services.controller.api import Heartbeat
from services.controller.book import RunBook
from services.controller.log import OperationLog
from services.controller.processes import ProcessId, is_alive, kill
from services.controller.scaling import Scaling
from services.controller.store import Store

logger = logging.getLogger("ray.serve")

KILL_DEADLINE_S = 20.0
SERVE_DEADLINE_S = 20.0
SERVE_POLL_S = 5.0
"""Serve's status is costly, and is only asked for while a replica is missing."""
GLOBAL_POLL_S = 0.5
ATTEMPTS = "attempts"
NOT_UP = frozenset({"starting", "failed"})
GLOBAL_ORDER = (names.ACTOR, names.REF, names.TEACHER, names.REWARD, names.INSTANCE, names.EVALUATOR, names.ROLLOUT)
"""Who ends first: consumers before what they consume from, DCS last, because it keeps the newest state."""


class Bus(Protocol):
    async def renew(self) -> None: ...


@dataclass(slots=True)
class Pending:
    """An operation on one replica, until its successor is up. `done_at`: the tick when the action was carried out."""

    operation: str
    finding: Finding
    action: Action
    done_at: float | None = None
    task: asyncio.Task[None] | None = None


class Recovery:
    """`fail_run(reason)` ends the run. Times of attempts are Unix seconds, so that they outlive this process."""

    def __init__(
        self,
        book: RunBook,
        log: OperationLog,
        store: Store,
        scaling: Scaling,
        bus: Bus,
        node: str,
        fail_run: Callable[[str], Awaitable[None]],
    ) -> None:
        self.book, self.log, self.scaling = book, log, scaling
        self._store, self._bus, self._node, self._fail_run = store, bus, node, fail_run
        self._attempts = [Attempt(*attempt) for attempt in store.get(ATTEMPTS) or []]
        self._pending: dict[str, Pending] = {}
        self._proving: dict[str, float] = {}
        """Replica -> when it had recovered."""
        self._global: asyncio.Task[None] | None = None
        self._now = time.monotonic()
        self._serve: dict[str, serve_apps.AppState] = {}
        self._serve_asked_at = -SERVE_POLL_S

    @property
    def config(self) -> RecoveryConfig:
        return self.book.recovery

    def in_global_recovery(self) -> bool:
        return self._global is not None and not self._global.done()

    async def step(self, now: float) -> None:
        """Once per tick; `now`: monotonic. Long work goes on in tasks."""
        self._now = now
        if self.in_global_recovery():
            return
        if self._global is not None:
            self._global.result()
        self.book.retire_unknown(now)
        await self._forgive(now)
        await self._follow_pending(now)
        findings = self._findings(now)
        for finding in findings:
            if self.in_global_recovery():
                return
            await self._answer(finding, now)
        await self._close_incidents(findings)

    # ------------------------------------------------------------------ detection

    def _alive(self, beat: Heartbeat) -> bool:
        """What cannot be seen from here may live: its silence will tell."""
        if beat.node != self._node or not beat.started_s:
            return True
        return is_alive(ProcessId(beat.node, beat.pid, beat.started_s))

    def _findings(self, now: float) -> list[Finding]:
        leaving = self._leaving()
        replicas = [replica for replica in self.book.health(now, self._alive) if replica.instance not in leaving]
        findings = find_faults(replicas, self.config)
        findings += self._failed_instances()
        found = {finding.instance for finding in findings}
        for instance in self.book.unable_to_adopt():
            if instance not in found:
                findings.append(self._of_instance(instance, Fault.ENGINE_WITHOUT_WEIGHTS, "it could not adopt weights"))
        for instance, part in find_stragglers(self.book.token_rates(), self.config.straggler_factor).items():
            if instance not in found:
                detail = (
                    f"{part:.2f} of its peers' tokens/s per request over {self.config.straggler_window_s:g} s, "
                    f"the limit is {self.config.straggler_factor:g}"
                )
                findings.append(self._of_instance(instance, Fault.STRAGGLER, detail))
        return findings

    def _leaving(self) -> set[str]:
        """Instances that their manager takes away: how they end is nobody's fault."""
        facts = self.book.manager_facts()
        return set(facts.get("instances", {})) - {*facts.get("training", ()), *facts.get("evaluators", ())}

    def _of_instance(self, instance: str, fault: Fault, detail: str) -> Finding:
        account = self.book.replicas[instance]
        return Finding(account.beat.role, instance, account.beat.replica_id, fault, detail)

    def _failed_instances(self) -> list[Finding]:
        """Wanted by the manager, and given up by it."""
        facts = self.book.manager_facts()
        instances = facts.get("instances", {})
        wanted = [(names.INSTANCE, name) for name in facts.get("training", ())]
        wanted += [(names.EVALUATOR, name) for name in facts.get("evaluators", ())]
        return [
            Finding(role, name, f"{name} failed", Fault.DEPLOY_FAILED, str(told["reason"]))
            for role, name in wanted
            if (told := instances.get(name)) is not None and told["state"] == InstanceState.FAILED.value
        ]

    # ------------------------------------------------------------------ decision

    async def _answer(self, finding: Finding, now: float) -> None:
        pending = self._pending.get(finding.instance)
        if pending is not None:
            return
        incident = self.log.open_incident(finding.instance, finding.fault.value)
        if incident is not None and incident.decision and incident.operation is None:
            return  # it is told, and nothing more is done
        if incident is None:
            incident = await self.log.record(self._incident(finding, now))
        if not self.config.enabled:
            await self.log.record(replace(incident, decision="recovery is switched off (controller.recovery.enabled)"))
            return
        instances = max(1, len(self.book.manager_facts().get("training", ())))
        decision = decide(
            finding.role, finding.instance, finding.fault, self._attempts, time.time(), self.config, instances
        )
        logger.warning("%s of %s: %s; %s", finding.fault, finding.instance, finding.detail, decision.reason)
        await self._carry_out(decision, finding, incident)

    def _incident(self, finding: Finding, now: float) -> Incident:
        account = self.book.replicas.get(finding.instance)
        beat = account.beat if account is not None else None
        return Incident(
            id=self.log.new_incident_id(),
            fault=finding.fault.value,
            role=finding.role,
            instance=finding.instance,
            at_s=time.time(),
            detail=finding.detail,
            node=beat.node if beat else "",
            pid=beat.pid if beat else 0,
            last_progress_s=now - account.progress_at if account else None,
            traceback=beat.error if beat else None,
        )

    async def _carry_out(self, decision: Decision, finding: Finding, incident: Incident) -> None:
        if decision.action is Action.NONE:
            await self.log.record(replace(incident, decision=decision.reason))
            return
        if decision.action is Action.FAIL_RUN:
            await self.log.record(replace(incident, decision=decision.reason))
            await self._fail_run(self._report(decision.reason, incident))
            return
        await self._note_attempt(decision)
        if decision.action is Action.GLOBAL_RECOVERY:
            await self.log.record(replace(incident, decision=f"global recovery: {decision.reason}"))
            await self._begin_global(decision, incident)
            return
        operation = await self.log.begin(
            decision.action.value,
            finding.instance,
            f"{finding.fault}: {finding.detail}",
            incident=incident.id,
            not_before_s=decision.not_before_s,
        )
        chosen = f"{decision.action}: {decision.reason}"
        await self.log.record(replace(incident, decision=chosen, operation=operation.id))
        pending = Pending(operation.id, finding, decision.action)
        self._pending[finding.instance] = pending
        pending.task = asyncio.get_running_loop().create_task(self._act(pending, decision.not_before_s))

    async def _note_attempt(self, decision: Decision) -> None:
        now_s = time.time()
        kept = [attempt for attempt in self._attempts if now_s - attempt.at_s < self.config.window_s]
        await self._keep_attempts([*kept, Attempt(decision.budget, now_s)])

    async def _keep_attempts(self, attempts: list[Attempt]) -> None:
        self._attempts = attempts
        await asyncio.to_thread(self._store.set, attempts=[[kept.budget, kept.at_s] for kept in attempts])

    async def _forgive(self, now: float) -> None:
        """A replica that has recovered and worked since has its budget back: only fruitless recoveries add up."""
        for instance, since in list(self._proving.items()):
            account = self.book.replicas.get(instance)
            if instance in self._pending or account is None or account.retired:
                del self._proving[instance]
            elif now - since >= self.config.forgive_after_s and account.has_worked():
                del self._proving[instance]
                await self._keep_attempts([kept for kept in self._attempts if kept.budget != instance])

    @staticmethod
    def _report(reason: str, incident: Incident) -> str:
        last = f"; the last error: {incident.traceback.splitlines()[-1]}" if incident.traceback else ""
        return (
            f"{incident.role} {incident.instance}: {reason}; {incident.detail}{last} (`relax incidents` has the rest)"
        )

    # ------------------------------------------------------------------ action

    async def _act(self, pending: Pending, not_before_s: float) -> None:
        """Errors of the action fail its operation; the fault is then answered again, out of what is left."""
        try:
            await asyncio.sleep(max(0.0, not_before_s - time.time()))
            await self.log.start(pending.operation)
            await self._act_now(pending)
            pending.done_at = self._now
        except (RelaxError, RayError, OSError) as error:
            await self._drop(pending, f"{type(error).__name__}: {error}")

    async def _act_now(self, pending: Pending) -> None:
        instance, step = pending.finding.instance, self.log.step
        match pending.action:
            case Action.WAIT:
                await step(pending.operation, "wait", "Serve replaces the process")
            case Action.RESTART_REPLICA:
                await step(pending.operation, "kill", await self._kill(instance, pending.finding.replica_id))
            case Action.REDEPLOY:
                account = self.book.replicas.get(instance)
                app = account.beat.app if account is not None and account.beat.app else instance
                await asyncio.to_thread(serve_apps.redeploy, app, pending.operation, SERVE_DEADLINE_S)
                await step(pending.operation, "redeploy", f"gave Serve application '{app}' anew")
            case Action.REPLACE_INSTANCE:
                self.scaling.replace(instance)
                await step(pending.operation, "replace", "told the rollout manager")
            case _:
                raise RelaxError(f"{pending.action} is no local action")

    async def _kill(self, instance: str, replica_id: str | None = None) -> str:
        """What came of it, in words. `replica_id`: only if it is this one still."""
        account = self.book.replicas.get(instance)
        if account is None or (replica_id is not None and account.beat.replica_id != replica_id):
            return "its successor is there already"
        beat = account.beat
        if not beat.started_s:
            raise RelaxError(f"{instance} has not told its process")
        process = ProcessId(beat.node, beat.pid, beat.started_s)
        killed = await asyncio.to_thread(kill, process, self._node, KILL_DEADLINE_S)
        return f"process {beat.pid} on node {beat.node[:8]} " + ("was killed" if killed else "was gone")

    async def _drop(self, pending: Pending, error: str) -> None:
        """It came to nothing: the fault is looked at again at the next tick."""
        self._pending.pop(pending.finding.instance, None)
        operation = self.log.operation(pending.operation)
        if operation.state is OperationState.PENDING:
            await self.log.cancel(operation.id, error)
        elif not operation.ended:
            await self.log.fail(operation.id, error)

    async def _follow_pending(self, now: float) -> None:
        for pending in list(self._pending.values()):
            if pending.task is not None and pending.task.done():
                pending.task.result()  # what is no fault of the action is one of ours
            if pending.done_at is None:
                continue
            if self._recovered(pending, now):
                self._pending.pop(pending.finding.instance, None)
                self._proving[pending.finding.instance] = now
                await self.log.succeed(pending.operation)
                await self.log.end_incidents(pending.finding.instance)
                continue
            state = await self._serve_state(pending.finding, now)
            failed = state is not None and state.status == serve_apps.DEPLOY_FAILED
            late = now - pending.done_at > self.config.start_s
            if late or (failed and pending.action is not Action.REDEPLOY):
                await self._drop(pending, f"not back within {self.config.start_s:g} s" if late else "Serve gave it up")
                fault = Fault.DEPLOY_FAILED if failed else Fault.STUCK_DEPLOYING
                detail = state.message if failed and state is not None else "it has not come up again"
                await self._answer(replace(pending.finding, fault=fault, detail=detail), now)

    def _recovered(self, pending: Pending, now: float) -> bool:
        """Its successor is up, and is heard of."""
        finding = pending.finding
        if pending.action is Action.REPLACE_INSTANCE:
            return self.scaling.replaced(finding.instance, self.book.manager_facts())
        account = self.book.replicas.get(finding.instance)
        if account is None or account.retired:
            return True
        beat = account.beat
        heard = now - account.seen_at < silence_limit_s(beat.role, self.config)
        return beat.replica_id != finding.replica_id and beat.state not in NOT_UP and heard

    async def _serve_state(self, finding: Finding, now: float) -> serve_apps.AppState | None:
        """None where Serve says nothing, and of instances, which their manager watches."""
        if finding.role in (names.INSTANCE, names.EVALUATOR):
            return None
        if now - self._serve_asked_at >= SERVE_POLL_S:
            self._serve_asked_at = now
            try:
                self._serve = await asyncio.to_thread(serve_apps.app_states, SERVE_DEADLINE_S)
            except RayError as error:  # Serve's controller is being replaced itself
                logger.warning("Serve does not say how its applications are: %s", error)
        account = self.book.replicas.get(finding.instance)
        app = account.beat.app if account is not None and account.beat.app else finding.instance
        return self._serve.get(app)

    async def _close_incidents(self, findings: list[Finding]) -> None:
        """Those that went away by themselves."""
        found = {(finding.instance, finding.fault.value) for finding in findings}
        for incident in self.log.incidents():
            still = (incident.instance, incident.fault) in found or incident.instance in self._pending
            if incident.ended_s is None and not still and incident.instance != names.BUS:
                await self.log.end_incidents(incident.instance, frozenset({incident.fault}))

    # ------------------------------------------------------------------ the bus, and everything

    async def bus_lost(self, why: str) -> None:
        """Renew it, within its budget. Returns when it is there again, or the run has failed."""
        if self._global is not None and not self._global.done():  # which makes it anew itself
            await asyncio.wait({self._global})
            return
        finding = Finding(names.BUS, names.BUS, why, Fault.BUS_LOST, why)
        incident = await self.log.record(self._incident(finding, time.monotonic()))
        decision = decide(names.BUS, names.BUS, Fault.BUS_LOST, self._attempts, time.time(), self.config)
        if decision.action is not Action.RENEW_BUS:
            await self._carry_out(decision, finding, incident)
            if self._global is not None:
                await asyncio.wait({self._global})
            return
        await self._note_attempt(decision)
        operation = await self.log.begin(
            decision.action.value, names.BUS, why, incident=incident.id, not_before_s=decision.not_before_s
        )
        await self.log.record(replace(incident, decision=decision.reason, operation=operation.id))
        await asyncio.sleep(max(0.0, decision.not_before_s - time.time()))
        await self.log.start(operation.id)
        try:
            await self._renew_bus(operation.id)
        except RelaxError as error:  # tried again, out of what is left of the budget
            await self.log.fail(operation.id, str(error))
            return
        await self.log.succeed(operation.id)
        await self.log.end_incidents(names.BUS)

    async def _renew_bus(self, operation: str) -> None:
        self.book.bus_restarts += 1
        await self.log.step(operation, "renew the bus", f"number {self.book.bus_restarts}")
        await self._bus.renew()

    async def _begin_global(self, decision: Decision, incident: Incident) -> None:
        for pending in list(self._pending.values()):
            if pending.task is not None:
                pending.task.cancel()
            await self._drop(pending, "overtaken by a global recovery")
        operation = await self.log.begin(
            decision.action.value, RUN, decision.reason, incident=incident.id, not_before_s=decision.not_before_s
        )
        await self.log.record(replace(incident, operation=operation.id))
        self._global = asyncio.get_running_loop().create_task(
            self._recover_globally(operation.id, decision.not_before_s), name="global-recovery"
        )

    async def _recover_globally(self, operation: str, not_before_s: float) -> None:
        """A new incarnation of every role, each from its durable state; Ray stays, the bus is a new one."""
        await asyncio.sleep(max(0.0, not_before_s - time.time()))
        await self.log.start(operation)
        try:
            before = {account.beat.instance: account.beat.replica_id for account in self.book.living()}
            for role in (*GLOBAL_ORDER, names.DCS):
                for account in self.book.living():
                    if account.beat.role == role:
                        done = await self._kill(account.beat.instance)
                        await self.log.step(operation, f"restart {account.beat.instance}", done)
            await self._renew_bus(operation)
            await self.log.step(operation, "wait until every role is up again")
            await self._until_all_up(operation, before)
        except (RelaxError, RayError, OSError) as error:
            await self.log.fail(operation, f"{type(error).__name__}: {error}")
            return
        await self.log.succeed(operation)
        for incident in self.log.incidents():
            if incident.ended_s is None:
                await self.log.end_incidents(incident.instance)

    async def _until_all_up(self, operation: str, before: dict[str, str]) -> None:
        """Those that Serve has given up are redeployed once. Raises `RelaxError` past the deadline."""
        end = time.monotonic() + self.book.args.controller.start_deadline_s
        redeployed: set[str] = set()
        while missing := self._missing(before):
            if time.monotonic() > end:
                limit_s = self.book.args.controller.start_deadline_s
                raise RelaxError(f"{', '.join(missing)} not up again within {limit_s:g} s")
            for instance in set(missing) - redeployed:
                account = self.book.replicas[instance]
                finding = Finding(account.beat.role, instance, "", Fault.DEPLOY_FAILED, "")
                state = await self._serve_state(finding, time.monotonic())
                if state is not None and state.status == serve_apps.DEPLOY_FAILED:
                    redeployed.add(instance)
                    await self.log.step(operation, f"redeploy {instance}", state.message)
                    await asyncio.to_thread(serve_apps.redeploy, account.beat.app, operation, SERVE_DEADLINE_S)
            await asyncio.sleep(GLOBAL_POLL_S)

    def _missing(self, before: dict[str, str]) -> list[str]:
        return [
            account.beat.instance
            for account in self.book.living()
            if account.beat.replica_id == before.get(account.beat.instance) or account.beat.state in NOT_UP
        ]
