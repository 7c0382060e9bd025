"""The instances of a run: each its own Serve application, made, watched and removed here.

Replicas of one deployment would not do: Serve chooses the victim on scale-down, settings are per deployment,
and a scale-up that fails is retried for ever while the status stays healthy.

How many are wanted, and which are to be replaced, comes with the controller's answer to each heartbeat. A replacement
is a new instance with a new number: what Serve still does with the old name does not concern it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from relax.config.sections import RolloutArgs
from relax.control.lifecycle import FINAL, Deadlines, Instance, InstanceState
from relax.types import Purpose
from services.names import INSTANCE_PREFIX, evaluator_app, evaluator_number, instance_app, instance_number
from services.rollout.api import InstanceStatus
from services.rollout.instance import RolloutInstance
from services.runtime import RoleReporter, ServiceUnavailable, call

logger = logging.getLogger("ray.serve")

STARTING_POLL_S, SETTLED_POLL_S = 0.5, 3.0
"""Serve's status is costly to ask for; once all instances serve, changes are rare."""
DIRECTIVE_POLL_S = 0.5
STATUS_DEADLINE_S = 5.0
DRAIN_S = 30.0


class InstancePool:
    """`run` creates the wanted instances side by side and follows each through its life cycle.

    `training` and `evaluators` are the wanted ones; `instances` also keeps those that were taken away.
    """

    def __init__(self, args: RolloutArgs, reporter: RoleReporter):
        self.args, self.reporter = args, reporter
        self.deadlines = Deadlines.from_config(args.rollout, DRAIN_S)
        self.instances: dict[str, Instance] = {}
        self.training: list[str] = []
        self.evaluators = [evaluator_app(number) for number in range(args.rollout.eval.instances)]
        self._statuses: dict[str, InstanceStatus] = {}
        self._next_training = self._next_evaluator = 0
        """Above every number that an instance has had, as far as this manager knows."""
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        existing = await asyncio.to_thread(self._existing)
        self._take_up(existing)
        wanted = [*self.training, *self.evaluators]
        await asyncio.gather(*(self._create(name) for name in wanted if name not in existing))
        for name in wanted:  # made by an earlier life of this manager
            if name in existing:
                self._move(name, InstanceState.CREATING)
        while not self.reporter.stopped.is_set():
            await self._follow_directive()
            await self._observe_all()
            settled = all(i.serving or i.state in FINAL for i in self.instances.values())
            await self._pause(SETTLED_POLL_S if settled else STARTING_POLL_S)

    def _take_up(self, existing: set[str]) -> None:
        """Those of an earlier life, and new ones up to the wanted number."""
        training = sorted(number for name in existing if (number := instance_number(name)) is not None)
        evaluators = sorted(number for name in existing if (number := evaluator_number(name)) is not None)
        self._next_training, self._next_evaluator = 1 + max(training, default=-1), 1 + max(evaluators, default=-1)
        self.training[:] = [instance_app(number) for number in training]
        self.evaluators[:] = [evaluator_app(number) for number in evaluators]
        while len(self.training) < (self.reporter.directive.instances or self.args.rollout.instances):
            self.training.append(self._new_training())
        while len(self.evaluators) < self.args.rollout.eval.instances:
            self.evaluators.append(self._new_evaluator())
        now = time.monotonic()
        for name in (*self.training, *self.evaluators):
            self.instances[name] = Instance(name, now)

    def _new_training(self) -> str:
        self._next_training += 1
        return instance_app(self._next_training - 1)

    def _new_evaluator(self) -> str:
        self._next_evaluator += 1
        return evaluator_app(self._next_evaluator - 1)

    async def _pause(self, seconds: float) -> None:
        """Cut short by a directive that asks for something else."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._asked() and not self.reporter.stopped.is_set():
            await asyncio.sleep(min(DIRECTIVE_POLL_S, seconds))

    def _asked(self) -> bool:
        directive = self.reporter.directive
        wanted = directive.instances
        return (wanted is not None and wanted != len(self.training)) or any(
            name in self.training or name in self.evaluators for name in directive.replace
        )

    @staticmethod
    def _existing() -> set[str]:
        """Those on their way out are not ours any more."""
        leaving = (ApplicationStatus.DELETING,)
        found = serve.status().applications
        return {name for name, app in found.items() if name.startswith(INSTANCE_PREFIX) and app.status not in leaving}

    # ------------------------------------------------------------------ how many, and which

    async def _follow_directive(self) -> None:
        """Replace and scale as the controller says; the same directive twice asks for nothing more."""
        directive = self.reporter.directive
        fresh: list[str] = []
        for wanted, new in ((self.training, self._new_training), (self.evaluators, self._new_evaluator)):
            for name in set(directive.replace) & set(wanted):
                self._take_away(name, "it is replaced")
                wanted.append(new())
                fresh.append(wanted[-1])
        if directive.instances is not None:
            while len(self.training) < directive.instances:
                self.training.append(self._new_training())
                fresh.append(self.training[-1])
            while len(self.training) > max(1, directive.instances):
                self._take_away(self._victim(), f"{directive.instances} instances are wanted")
        for name in fresh:
            self.instances[name] = Instance(name, time.monotonic())
        self._publish_facts()
        await asyncio.gather(*(self._create(name) for name in fresh))

    def _victim(self) -> str:
        """One that does not serve, else the newest."""
        idle = [name for name in self.training if not self.instances[name].serving]
        return (idle or self.training)[-1]

    def _take_away(self, name: str, reason: str) -> None:
        """No longer wanted; it is drained and removed beside what else goes on."""
        for wanted in (self.training, self.evaluators):
            if name in wanted:
                wanted.remove(name)
        if self.instances[name].state in FINAL:
            return
        if self.instances[name].state is InstanceState.PENDING:
            self._move(name, InstanceState.STOPPED, reason)
            return
        self._move(name, InstanceState.DRAINING, reason)
        task = asyncio.get_running_loop().create_task(self._drain(name))
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.reporter.fail(error)

    async def _drain(self, name: str) -> None:
        """What it has not finished by the deadline goes back to the bus, and to others."""
        try:
            finished = await call(name, "drain", DRAIN_S, deadline_s=DRAIN_S + STATUS_DEADLINE_S)
            self.reporter.count("instances_drained" if finished else "instances_cut_short")
        except (ServiceUnavailable, RayServeException) as error:  # dead or stopped: its leases expire
            self.reporter.count("instances_cut_short")
            logger.warning("%s was not drained: %s", name, error)
        await asyncio.to_thread(serve.delete, name, False)
        self._move(name, InstanceState.STOPPED, self.instances[name].reason)
        self._publish_facts()

    # ------------------------------------------------------------------ each

    async def _create(self, name: str) -> None:
        self._move(name, InstanceState.CREATING)
        app = RolloutInstance.options(  # type: ignore[attr-defined]
            num_replicas=1,
            ray_actor_options={
                "num_cpus": self.args.rollout.instance_num_cpus,
                "resources": dict(self.args.rollout.instance_resources),
            },
        ).bind(self.args, name, self._purposes(name))
        await asyncio.to_thread(
            serve.run_many,
            [RunTarget(app, name=name, route_prefix=None)],
            wait_for_ingress_deployment_creation=True,
            wait_for_applications_running=False,
        )

    def _purposes(self, name: str) -> tuple[str, ...]:
        if evaluator_number(name) is not None:
            return (Purpose.EVAL.value,)
        return (Purpose.TRAIN.value,) if self.evaluators else (Purpose.TRAIN.value, Purpose.EVAL.value)

    async def _observe_all(self) -> None:
        """Ask each instance; ask Serve about those that are not serving, or did not answer."""
        living = [
            name
            for name, instance in self.instances.items()
            if instance.state not in FINAL and instance.state is not InstanceState.DRAINING
        ]
        serving = [name for name in living if self.instances[name].serving]
        answered = await asyncio.gather(*(self._ask(name) for name in serving))
        silent = set(living) - {name for name, answer in zip(serving, answered, strict=True) if answer}
        if silent:
            statuses = await self._statuses_of_serve()
            await asyncio.gather(*(self._observe(name, statuses[name].status) for name in silent if name in statuses))
        self._publish_facts()
        training = [self.instances[name] for name in self.training]
        never = not any(instance.was_active for instance in self.instances.values())
        if training and never and all(i.state is InstanceState.FAILED for i in training):
            reasons = "; ".join(f"{i.name}: {i.reason}" for i in training)
            self.reporter.end_run(f"every rollout instance failed: {reasons}")

    @staticmethod
    async def _statuses_of_serve() -> dict[str, serve.schema.ApplicationStatusOverview]:
        try:
            return dict(await asyncio.to_thread(lambda: serve.status().applications))
        except (RayError, RayServeException) as error:  # Serve's controller is being replaced itself
            logger.warning("Serve does not say how its applications are: %s", error)
            return {}

    def _publish_facts(self) -> None:
        self.reporter.facts["instances"] = {
            name: {"state": instance.state.value, "reason": instance.reason, "restarts": instance.restarts}
            for name, instance in self.instances.items()
        }
        self.reporter.facts["training"] = list(self.training)
        self.reporter.facts["evaluators"] = list(self.evaluators)

    async def _observe(self, name: str, app: ApplicationStatus) -> None:
        instance = self.instances[name]
        if app == ApplicationStatus.DEPLOY_FAILED:
            await self._fail(name, "its application could not be deployed")
            return
        if instance.state is InstanceState.CREATING and app == ApplicationStatus.RUNNING:
            self._move(name, InstanceState.HEALTH_CHECKING)
        if self.instances[name].state is not InstanceState.CREATING:
            await self._ask(name)
        late = self.instances[name].late(time.monotonic(), self.deadlines)
        if late is not None:
            await self._fail(name, late)

    async def _ask(self, name: str) -> bool:
        """Follow the instance's own word about itself. False if it has none."""
        try:
            status: InstanceStatus = await call(name, "status", deadline_s=STATUS_DEADLINE_S)
        except (ServiceUnavailable, RayServeException) as error:
            logger.debug("%s: %s", name, error)
            return False
        before = self._statuses.get(name)
        self._statuses[name] = status
        if before is not None and before.replica_id != status.replica_id:
            self._move(name, InstanceState.HEALTH_CHECKING, "its replica was replaced")
        if status.draining:
            self._take_away(name, "an earlier manager was taking it away")
            return True
        if self.instances[name].state is InstanceState.HEALTH_CHECKING:
            self._move(name, InstanceState.WEIGHT_SYNCING)
        if status.version >= 0 and self.instances[name].state is InstanceState.WEIGHT_SYNCING:
            self._move(name, InstanceState.READY)
        if status.running_samples and self.instances[name].state is InstanceState.READY:
            self._move(name, InstanceState.ACTIVE)
        return True

    async def _fail(self, name: str, reason: str) -> None:
        """Nothing half-made stays behind."""
        self._move(name, InstanceState.FAILED, reason)
        self.reporter.count("instances_failed")
        logger.error("%s failed: %s", name, reason)
        await asyncio.to_thread(serve.delete, name, False)

    def _move(self, name: str, state: InstanceState, reason: str = "") -> None:
        self.instances[name] = self.instances[name].move(state, time.monotonic(), reason)

    async def remove_all(self) -> None:
        for task in self._leaving:
            task.cancel()
        names = await asyncio.to_thread(lambda: set(serve.status().applications))
        mine = [name for name in names if name.startswith(INSTANCE_PREFIX)]
        await asyncio.gather(*(asyncio.to_thread(serve.delete, name, True) for name in mine))
