"""Processes of replicas: is one alive, and end it, on any node, never one that merely has its number.

A process is known by node, number and start time: a number that came back belongs to another start time.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_TOLERANCE_S = 0.05
"""The start time is read from the same file each time; it is exact to a hundredth of a second."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`started_s`: Unix seconds, as psutil tells. `node`: Ray's node id."""

    node: str
    pid: int
    started_s: float


def own_process(node: str) -> ProcessId:
    return ProcessId(node, os.getpid(), psutil.Process().create_time())


def is_alive(process: ProcessId) -> bool:
    """On this node. A zombie is dead, a stopped process is alive."""
    try:
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.started_s) < START_TOLERANCE_S
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_here(process: ProcessId) -> bool:
    """SIGKILL it, on this node. False if it is gone already, or the number is another process's."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill(process: ProcessId, here: str, deadline_s: float) -> bool:
    """As `kill_here`, on the process's own node. Blocks. Raises `ray.exceptions.RayError` where it does not answer."""
    if process.node == here:
        return kill_here(process)
    there = ray.remote(kill_here).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(process.node, soft=False), max_retries=0
    )
    return bool(ray.get(there.remote(process), timeout=deadline_s))
