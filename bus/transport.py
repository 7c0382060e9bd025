"""The client's side of TransferQueue: blobs to and from its storage units, and the commit notice.

Uses the storage manager of TransferQueue 0.1.11 (pinned) below its TensorDict interface: a blob is
one value of one column, so no tensor is nested, padded or pickled, and torch is not touched. The
stock notice swallows a lost or failed acknowledgement; this one returns the answer or raises.
Everything here runs on the client's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bus.codec import Blob
from bus.errors import BusTimeout, BusUnavailable, CorruptRow
from bus.tq import (
    AsyncSimpleStorageManager,
    StorageKeyNotFoundError,
    StorageUnitTimeout,
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
    ZMQSocketPool,
)


class BlobStore(AsyncSimpleStorageManager):  # type: ignore[misc]
    """Attaches to running storage units. Constructing it blocks for the handshake."""

    def __init__(self, engine: ZMQServerInfo, stores: dict[str, ZMQServerInfo]) -> None:
        super().__init__(engine, {"zmq_info": stores})
        self._commits = ZMQSocketPool(self.zmq_context, self.storage_manager_id, "request_handle_socket")

    async def write(self, column: str, slots: list[int], blobs: list[Blob]) -> None:
        """Store blobs[i] in `column` of storage row slots[i]. Not visible to anybody yet."""

        async def to_unit(unit: str, indexes: list[int], positions: list[int]) -> None:
            payload = {column: [blobs[position] for position in positions]}
            request = partial(self._put_to_single_storage_unit, indexes, payload, target_storage_unit=unit)
            await self._request_with_retry("put", unit, f"rows={len(indexes)}", request)

        routes = self._group_by_hash(slots)
        with _typed("writing to the storage"):
            await asyncio.gather(
                *(to_unit(u, route.global_indexes, route.batch_positions) for u, route in routes.items())
            )

    async def read(self, columns: tuple[str, ...], slots: list[int]) -> dict[tuple[int, str], Blob]:
        """The blobs of `columns` of each storage row, by (slot, column)."""
        found: dict[tuple[int, str], Blob] = {}

        async def from_unit(unit: str, indexes: list[int]) -> None:
            request = partial(self._get_from_single_storage_unit, indexes, list(columns), target_storage_unit=unit)
            _, data = await self._request_with_retry("get", unit, f"rows={len(indexes)}", request)
            for column in columns:
                for slot, value in zip(indexes, data[column], strict=True):
                    found[slot, column] = value if isinstance(value, bytes) else np.asarray(value)

        routes = self._group_by_hash(slots)
        with _typed("reading from the storage"):
            await asyncio.gather(*(from_unit(unit, route.global_indexes) for unit, route in routes.items()))
        return found

    async def commit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tell the engine that the bytes of a put are stored. Returns its answer."""
        message = ZMQMessage.create(
            request_type=ZMQRequestType.NOTIFY_DATA_UPDATE, sender_id=self.storage_manager_id, body=body
        )
        async with self._commits.alease(self.controller_info) as socket:
            await socket.send_multipart(message.serialize())
            reply = ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
        if reply.request_type != ZMQRequestType.NOTIFY_DATA_UPDATE_ACK:
            raise BusUnavailable(f"the engine refused a commit: {reply.body.get('message', reply.request_type)}")
        answer: dict[str, Any] = reply.body
        return answer

    def close(self) -> None:
        if hasattr(self, "_commits"):
            self._commits.close()
        super().close()


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except StorageUnitTimeout as error:
        raise BusTimeout(f"{what}: {error}") from error
    except StorageKeyNotFoundError as error:
        raise CorruptRow(f"{what}: a row is gone: {error}") from error
    except RuntimeError as error:
        raise BusUnavailable(f"{what}: {error}") from error
