"""TransferQueue's names that the bus uses, imported without torch's compiler.

TransferQueue imports tensordict, which on import marks some functions for torch.compile, and that loads the
whole compiler: 85 MB and more than a second in every process that talks to the bus, for a feature that no
process here uses. So the two marks are identities while tensordict is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.compiler

MARKS = ("allow_in_graph", "assume_constant_result")


@contextlib.contextmanager
def _marks_off() -> Iterator[None]:
    def unmarked(function: Any) -> Any:
        return function

    kept = {name: getattr(torch.compiler, name) for name in MARKS}
    for name in MARKS:
        setattr(torch.compiler, name, unmarked)
    try:
        yield
    finally:
        for name, mark in kept.items():
            setattr(torch.compiler, name, mark)


with _marks_off():
    from transfer_queue import controller, sampler
    from transfer_queue.storage import simple_storage
    from transfer_queue.storage.managers import simple_storage_manager
    from transfer_queue.utils import zmq_utils

AsyncSimpleStorageManager = simple_storage_manager.AsyncSimpleStorageManager
StorageUnitTimeout = simple_storage_manager.StorageUnitTimeout
StorageKeyNotFoundError = simple_storage.StorageKeyNotFoundError
SequentialSampler = sampler.SequentialSampler
ZMQMessage = zmq_utils.ZMQMessage
ZMQRequestType = zmq_utils.ZMQRequestType
ZMQServerInfo = zmq_utils.ZMQServerInfo
ZMQSocketPool = zmq_utils.ZMQSocketPool

__all__ = [
    "AsyncSimpleStorageManager",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StorageUnitTimeout",
    "ZMQMessage",
    "ZMQRequestType",
    "ZMQServerInfo",
    "ZMQSocketPool",
    "controller",
    "simple_storage",
]
