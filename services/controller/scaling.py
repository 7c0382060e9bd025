"""How many rollout instances are wanted, and which are to be replaced: told to the manager with its heartbeats.

The newest scale operation in the log is the wanted count, so it is durable with the operation. The manager is told the
same with each heartbeat, so nothing is lost with one, and it may be restarted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from relax.control.lifecycle import FINAL, SERVING, InstanceState
from relax.control.operations import Operation, OperationState
from services.controller.log import OperationLog

SCALE = "scale"


class Scaling:
    """`start_s`: how long instances may take to come up before a scale operation counts as failed."""

    def __init__(self, log: OperationLog, start_s: float) -> None:
        self._log, self._start_s = log, start_s
        self._replace: set[str] = set()

    @property
    def wanted(self) -> int | None:
        """None: nobody has scaled, the configuration holds."""
        for operation in reversed(self._log.operations()):
            if operation.kind == SCALE and operation.state is not OperationState.CANCELLED:
                return int(operation.request["replicas"])
        return None

    async def request(self, replicas: int, key: str | None) -> Operation:
        """Raises `KeyConflict`. Scale operations under way are overtaken by a new one."""
        cause = f"{replicas} instances were asked for"
        operation, new = await self._log.request(SCALE, "rollout", cause, {"replicas": replicas}, key)
        if new:
            for other in self._log.open_operations():
                if other.kind == SCALE and other.id != operation.id:
                    await self._log.cancel(other.id, f"overtaken by {operation.id}")
        return operation

    def replace(self, instance: str) -> None:
        """Take it away, and make another in its place."""
        self._replace.add(instance)

    def to_replace(self) -> tuple[str, ...]:
        return tuple(sorted(self._replace))

    def replaced(self, instance: str, manager: Mapping[str, Any]) -> bool:
        """The manager has taken it away, and as many serve as are wanted."""
        training = manager.get("training", ())
        return instance not in (*training, *manager.get("evaluators", ())) and settled(manager, len(training))

    async def follow(self, manager: Mapping[str, Any]) -> None:
        """`manager`: the facts of its last heartbeat."""
        training = set(manager.get("training", ()))
        if training:
            self._replace &= training | set(manager.get("evaluators", ()))
        now_s = time.time()
        for operation in self._log.open_operations():
            if operation.kind != SCALE:
                continue
            if operation.state is OperationState.PENDING:
                operation = await self._log.start(operation.id)
                operation = await self._log.step(operation.id, "told the rollout manager")
            replicas = int(operation.request["replicas"])
            if len(training) == replicas and settled(manager, replicas):
                await self._log.succeed(operation.id)
            elif operation.started_s is not None and now_s - operation.started_s > self._start_s:
                told = {name: told["state"] for name, told in manager.get("instances", {}).items()}
                await self._log.fail(operation.id, f"not reached within {self._start_s:g} s; the instances: {told}")


def settled(manager: Mapping[str, Any], replicas: int) -> bool:
    """So many training instances serve, and none is on its way out."""
    training = set(manager.get("training", ()))
    states = {name: InstanceState(told["state"]) for name, told in manager.get("instances", {}).items()}
    serving = sum(states.get(name) in SERVING for name in training)
    leaving = [name for name, state in states.items() if state not in FINAL and state is InstanceState.DRAINING]
    return serving == replicas and not leaving
