"""The instances of a run: each its own Serve application, made, watched and removed here.

Replicas of one deployment would not do: Serve chooses the victim on scale-down, settings are per deployment,
and a scale-up that fails is retried for ever while the status stays healthy.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ray import serve
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from relax.config.sections import RolloutArgs
from relax.control.lifecycle import FINAL, Deadlines, Instance, InstanceState
from relax.types import Purpose
from services.names import INSTANCE_PREFIX, evaluator_app, instance_app
from services.rollout.api import InstanceStatus
from services.rollout.instance import RolloutInstance
from services.runtime import RoleReporter, ServiceUnavailable, call

logger = logging.getLogger("ray.serve")

STARTING_POLL_S, SETTLED_POLL_S = 0.5, 3.0
"""Serve's status is costly to ask for; once all instances serve, changes are rare."""
STATUS_DEADLINE_S = 5.0
DRAIN_S = 30.0


class InstancePool:
    """`run` creates the wanted instances side by side and follows each through its life cycle."""

    def __init__(self, args: RolloutArgs, reporter: RoleReporter):
        self.args, self.reporter = args, reporter
        self.deadlines = Deadlines.from_config(args.rollout, DRAIN_S)
        self.instances: dict[str, Instance] = {}
        self.training = [instance_app(number) for number in range(args.rollout.instances)]
        self.evaluators = [evaluator_app(number) for number in range(args.rollout.eval.instances)]
        self._statuses: dict[str, InstanceStatus] = {}

    async def run(self) -> None:
        now = time.monotonic()
        existing = await asyncio.to_thread(self._existing)
        for name in (*self.training, *self.evaluators):
            self.instances[name] = Instance(name, now)
        wanted = [name for name in self.instances if name not in existing]
        await asyncio.gather(*(self._create(name) for name in wanted))
        for name in existing & set(self.instances):  # made by an earlier life of this manager
            self._move(name, InstanceState.CREATING)
        while not self.reporter.stopped.is_set():
            await self._observe_all()
            settled = all(i.serving or i.state in FINAL for i in self.instances.values())
            await asyncio.sleep(SETTLED_POLL_S if settled else STARTING_POLL_S)

    @staticmethod
    def _existing() -> set[str]:
        return {name for name in serve.status().applications if name.startswith(INSTANCE_PREFIX)}

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
        if name in self.evaluators:
            return (Purpose.EVAL.value,)
        return (Purpose.TRAIN.value,) if self.evaluators else (Purpose.TRAIN.value, Purpose.EVAL.value)

    async def _observe_all(self) -> None:
        """Ask each instance; ask Serve about those that are not serving, or did not answer."""
        living = [name for name, instance in self.instances.items() if instance.state not in FINAL]
        serving = [name for name in living if self.instances[name].serving]
        answered = await asyncio.gather(*(self._ask(name) for name in serving))
        silent = set(living) - {name for name, answer in zip(serving, answered, strict=True) if answer}
        if silent:
            statuses = await asyncio.to_thread(lambda: serve.status().applications)
            await asyncio.gather(*(self._observe(name, statuses[name].status) for name in silent if name in statuses))
        self.reporter.facts["instances"] = {
            name: {"state": instance.state.value, "reason": instance.reason, "restarts": instance.restarts}
            for name, instance in self.instances.items()
        }
        training = [self.instances[name] for name in self.training]
        if training and all(i.state is InstanceState.FAILED for i in training):
            reasons = "; ".join(f"{i.name}: {i.reason}" for i in training)
            self.reporter.end_run(f"every rollout instance failed: {reasons}")

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
        names = await asyncio.to_thread(self._existing)
        await asyncio.gather(*(asyncio.to_thread(serve.delete, name, True) for name in names))
