"""One worker process, seen from the pool: start, send, receive, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from relax.rewards.wire import FrameDecoder, WireError, encode
from relax.types import Json, RelaxError

READ_BYTES = 1 << 18
_THREAD_LIMITS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""BLAS threads reserve address space, and a scorer has one core anyway."""


class WorkerDied(RelaxError, RuntimeError):
    """The process ended or left the protocol; the message says how."""


class WorkerStartError(RelaxError, RuntimeError):
    """The process did not become ready."""


class WorkerProcess:
    """Owned by one task at a time. `kill` is the only way to end it; it is safe to call twice."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder = FrameDecoder()
        self._received: list[Json] = []
        self._killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, spec: Json, base: Path, memory_bytes: int, deadline_s: float) -> WorkerProcess:
        """Start one and wait until it has loaded the functions.

        Raises:
            WorkerStartError: the functions do not load (with the worker's words), or the deadline passed.
        """
        # A session of its own: one signal to the group reaches what user code forked, and Ctrl-C is not shared.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relax.rewards.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **_THREAD_LIMITS},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(deadline_s):
                await worker.send({"spec": spec, "base": str(base), "memory_bytes": memory_bytes})
                answer = await worker.receive()
        except (TimeoutError, WorkerDied) as error:
            await worker.kill()
            cause = str(error) or f"it was not ready within {deadline_s} s"
            raise WorkerStartError(f"a reward worker did not start: {cause}") from error
        except BaseException:
            await worker.kill()
            raise
        if "error" in answer:
            await worker.kill()
            raise WorkerStartError(f"a reward worker cannot load its functions: {answer['error']}")
        return worker

    async def send(self, value: Json) -> None:
        await self.send_bytes(encode(value))

    async def send_bytes(self, frame: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.is_closing():  # it died while it had nothing to do; uvloop refuses a write then
            raise WorkerDied(await self._how_it_ended())
        try:
            stdin.write(frame)
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied(await self._how_it_ended()) from error

    async def receive(self) -> Json:
        """The next frame. Cancelling loses nothing. Raises as `fill` does."""
        await self.fill()
        return self._received.pop()

    async def fill(self) -> None:
        """Wait until a frame can be received.

        Raises:
            WorkerDied: the process ended, or sent something that is no frame.
        """
        stdout = self._process.stdout
        assert stdout is not None
        while not self._received:
            data = await stdout.read(READ_BYTES)
            if not data:
                raise WorkerDied(await self._how_it_ended())
            try:
                self._received = self._decoder.feed(data)[::-1]
            except WireError as error:
                raise WorkerDied(f"it broke the protocol: {error}") from error

    async def kill(self) -> None:
        """Kill the process and its group, and wait until it is gone."""
        if not self._killed:
            # Also when the worker itself is gone: what it forked still is in its group.
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        stdin = self._process.stdin
        if stdin is not None:
            stdin.close()
        await self._process.wait()

    async def _how_it_ended(self) -> str:
        await self.kill()
        code = self._process.returncode
        if code is not None and code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process exited with code {code}"
