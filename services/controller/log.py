"""The operations log: what the controller does and saw, in memory and in the store, with waiters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from relax.control.operations import Incident, Operation, OperationState
from relax.types import Json, RelaxError
from services.controller.store import Store

logger = logging.getLogger("ray.serve")


class UnknownOperation(RelaxError, LookupError):
    """There is no operation of this id."""


class KeyConflict(RelaxError):
    """An idempotency key came back with another request."""


class OperationLog:
    """Used from the event loop; the store is written in a thread, in the order of the changes.

    An operation that was under way when an earlier controller died is failed with that reason, unless its kind is in
    `resumable`: those are for the caller to go on with.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._operations = {operation.id: operation for operation in store.operations()}
        self._incidents = {incident.id: incident for incident in store.incidents()}
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()

    # ------------------------------------------------------------------ operations

    def operations(self) -> list[Operation]:
        """The oldest first."""
        return list(self._operations.values())

    def open_operations(self) -> list[Operation]:
        return [operation for operation in self._operations.values() if not operation.ended]

    def operation(self, operation_id: str) -> Operation:
        """Raises `UnknownOperation`."""
        found = self._operations.get(operation_id)
        if found is None:
            raise UnknownOperation(f"there is no operation '{operation_id}'")
        return found

    async def wait(self, operation_id: str, wait_s: float) -> Operation:
        """The operation when it has ended, or as it is after `wait_s`."""
        self.operation(operation_id)

        async def ended() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self.operation(operation_id).ended)

        with contextlib.suppress(TimeoutError):  # it is told as it is
            await asyncio.wait_for(ended(), wait_s)
        return self.operation(operation_id)

    async def request(
        self, kind: str, target: str, cause: str, request: Mapping[str, Json], key: str | None
    ) -> tuple[Operation, bool]:
        """The operation of a request, and whether it is new: a key that was seen gives the operation it gave.

        Raises `KeyConflict` when the key came with another request.
        """
        async with self._writing:
            if key is not None:
                had = await asyncio.to_thread(self._store.operation_of_key, key)
                if had is not None:
                    if (had.kind, dict(had.request)) != (kind, dict(request)):
                        raise KeyConflict(
                            f"the idempotency key {key!r} was used for {had.kind} {dict(had.request)}: "
                            "use another key for another request"
                        )
                    return self._operations.get(had.id, had), False
            operation = Operation(_new_id("op"), kind, target, cause, self._clock(), request=request)
            await asyncio.to_thread(self._store.put_operation, operation, key)
            self._operations[operation.id] = operation
            return operation, True

    async def begin(
        self, kind: str, target: str, cause: str, *, incident: str | None = None, not_before_s: float = 0.0
    ) -> Operation:
        operation = Operation(
            _new_id("op"), kind, target, cause, self._clock(), incident=incident, not_before_s=not_before_s
        )
        return await self._put(operation)

    async def start(self, operation_id: str) -> Operation:
        return await self._put(self.operation(operation_id).start(self._clock()))

    async def step(self, operation_id: str, name: str, detail: str = "") -> Operation:
        logger.warning("operation %s: %s %s", operation_id, name, detail)
        return await self._put(self.operation(operation_id).step(name, self._clock(), detail))

    async def succeed(self, operation_id: str) -> Operation:
        return await self._put(self.operation(operation_id).succeed(self._clock()))

    async def fail(self, operation_id: str, error: str) -> Operation:
        logger.error("operation %s failed: %s", operation_id, error)
        return await self._put(self.operation(operation_id).fail(self._clock(), error))

    async def cancel(self, operation_id: str, reason: str) -> Operation:
        return await self._put(self.operation(operation_id).cancel(self._clock(), reason))

    async def cut_off(self, resumable: frozenset[str]) -> None:
        """After a restart of the controller: end what nobody goes on with. `resumable`: kinds that are gone on with."""
        for operation in self.open_operations():
            if operation.kind in resumable:
                continue
            if operation.state is OperationState.PENDING:
                await self.cancel(operation.id, "the controller was restarted before it began")
            else:
                await self.fail(operation.id, "the controller was restarted meanwhile; it looks anew")

    async def _put(self, operation: Operation) -> Operation:
        self._operations[operation.id] = operation
        async with self._writing:
            await asyncio.to_thread(self._store.put_operation, operation)
        async with self._changed:
            self._changed.notify_all()
        return operation

    # ------------------------------------------------------------------ incidents

    def incidents(self) -> list[Incident]:
        """The oldest first."""
        return list(self._incidents.values())

    def open_incident(self, instance: str, fault: str) -> Incident | None:
        for incident in reversed(self._incidents.values()):
            if incident.ended_s is None and (incident.instance, incident.fault) == (instance, fault):
                return incident
        return None

    async def record(self, incident: Incident) -> Incident:
        self._incidents[incident.id] = incident
        async with self._writing:
            await asyncio.to_thread(self._store.put_incident, incident)
        return incident

    async def end_incidents(self, instance: str, faults: frozenset[str] | None = None) -> None:
        """It is well again. `faults` None: all."""
        for incident in self.incidents():
            if incident.ended_s is None and incident.instance == instance and (not faults or incident.fault in faults):
                await self.record(replace(incident, ended_s=self._clock()))

    def fault_counts(self) -> dict[str, int]:
        """Fault -> incidents so far."""
        return dict(Counter(incident.fault for incident in list(self._incidents.values())))

    def new_incident_id(self) -> str:
        return _new_id("inc")


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"
