"""A scoring process: `python -m relax.rewards.worker PARENT_PID`, driven over stdin and stdout (see `wire`).

It stays light (no torch, no config package) because it is killed and replaced whenever user code hangs or
crashes. It limits its own address space, ends with its parent, and keeps the pipes out of user code's reach:
what user code prints goes to stderr, what it reads from stdin is empty.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from relax.rewards.base import RewardRequest, RewardResult
from relax.rewards.compose import ERROR_CHARS, RewardSpec, build_spec, score
from relax.rewards.wire import HEADER, SKIP_REST, FrameDecoder, encode
from relax.types import Json, RewardState

PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 3
EXIT_START = 4
EXIT_MEMORY = 5


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    requests, results = take_pipes()
    start = read_frame(requests)
    if start is None:
        return
    try:
        spec = build_spec(start["spec"], Path(start["base"]))
    except Exception as error:  # importing user code can raise anything: it is reported to the pool
        send(results, {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]})
        sys.exit(EXIT_START)
    gc.collect()
    baseline = address_space_bytes()
    limit = baseline + int(start["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(results, {"ready": True})
    serve(spec, requests, results, baseline)


def serve(spec: RewardSpec, requests: BinaryIO, results: BinaryIO, baseline: int) -> None:
    """Score batches until the pool closes its end."""
    while (batch := read_frame(requests)) is not None:
        if batch == SKIP_REST:  # it came after the end of the batch that it was about
            continue
        for data in batch:
            if select.select([requests], [], [], 0)[0]:  # only SKIP_REST or the end can come within a batch
                break
            try:
                result = score(spec, RewardRequest.from_json(data))
            except MemoryError:
                out_of_memory(results)
            send(results, result.to_json())
        send(results, {"grown_bytes": address_space_bytes() - baseline})


def out_of_memory(results: BinaryIO) -> None:
    """Report and exit: what else in this process lacks memory now is unknown."""
    result = RewardResult.failure(RewardState.CRASHED, "the reward function exceeded reward.memory_mb")
    send(results, result.to_json())
    os._exit(EXIT_MEMORY)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; pipe EOF covers the rest."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before the call
        os._exit(EXIT_ORPHAN)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to private, non-inheritable descriptors; 0 reads nothing and 1 becomes stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, results


def read_frame(stream: BinaryIO) -> Json:
    """The next value; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return FrameDecoder().feed(header + stream.read(length))[0]


def send(stream: BinaryIO, value: Json) -> None:
    try:
        stream.write(encode(value))
        stream.flush()
    except BrokenPipeError:  # the pool is gone
        os._exit(EXIT_ORPHAN)


def address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
