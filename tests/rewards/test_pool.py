import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax.config.roles import RewardConfig
from relax.rewards import pool as pool_module
from relax.rewards.base import RewardConfigError, RewardPoolError, RewardRequest, RewardResult
from relax.rewards.pool import MAX_BATCH, RewardPool, batch_size
from relax.rewards.process import WorkerProcess
from relax.rewards.wire import SKIP_REST
from relax.types import RewardState

OWN = """
import ctypes, os, subprocess, sys, time

def f(response, label, metadata):
    if response == "loop":
        while True:
            pass
    if response == "deaf":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
    if response == "slow":
        time.sleep(0.3)
        return 0.0
    if response == "exit":
        os._exit(0)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "allocate":
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    if response == "leak":
        f.kept = bytearray(40 << 20)
    if response == "crash once":
        if not os.path.exists(label):
            open(label, "w").close()
            os._exit(1)
    if response == "print":
        print("to nowhere", flush=True)
        os.write(1, b"\\0\\0\\0\\1x")
        return len(sys.stdin.read())
    if response == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open(label, "w").write(str(child.pid))
        while True:
            pass
    if response in ("nan", "inf"):
        return float(response)
    if response == "string":
        return "1.0"
    if response == "none":
        return None
    if response == "raise":
        raise ValueError("as asked")
    if response == "torch":
        return float("torch" in sys.modules or "pydantic" in sys.modules)
    return float(response)
"""


@pytest.fixture
def start_pool(tmp_path: Path) -> Callable[..., RewardPool]:
    (tmp_path / "own.py").write_text(OWN)

    def make(part: str = "own.py:f", **settings: Any) -> RewardPool:
        config = RewardConfig.model_validate({"parts": [{"name": part}], "timeout_s": 1.0, "memory_mb": 64} | settings)
        return RewardPool(config, max_response_tokens=16, base=tmp_path)

    return make


def ask(text: str, label: object = None) -> RewardRequest:
    return RewardRequest({}, text, label)


async def score_all(pool: RewardPool, texts: list[str]) -> list[RewardResult]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*(pool.score(ask(text)) for text in texts))


FATAL = [
    ("loop", RewardState.TIMEOUT, "timeout"),
    ("deaf", RewardState.TIMEOUT, "timeout"),
    ("exit", RewardState.CRASHED, "crash"),
    ("segfault", RewardState.CRASHED, "crash"),
    ("allocate", RewardState.CRASHED, "crash"),
]


@pytest.mark.parametrize(("fault", "state", "reason"), FATAL)
async def test_a_fatal_call_is_the_only_one_that_fails_and_its_worker_is_replaced(
    start_pool: Callable[..., RewardPool], fault: str, state: RewardState, reason: str
) -> None:
    """behaviour: B19"""
    async with start_pool() as pool:
        (before,) = pool.worker_pids
        texts = ["1", "2", fault, "3", "4"]
        results = await score_all(pool, texts)
        assert [result.reward for result in results] == [1.0, 2.0, None, 3.0, 4.0]
        assert results[2].state is state
        assert not psutil.pid_exists(before)
        assert set(pool.counters.worker_restarts) == {reason}
        assert pool.counters.retries["innocent"] == 2
        assert pool.counters.by_state == {RewardState.OK: 4, state: 1}
        assert (await pool.score(ask("5"))).reward == 5.0


async def test_other_workers_go_on_while_one_loops(start_pool: Callable[..., RewardPool]) -> None:
    """behaviour: B19"""
    async with start_pool(workers=2, timeout_s=30.0) as pool:
        looping = asyncio.create_task(pool.score(ask("loop")))
        results = await score_all(pool, ["1"] * 20)
        assert all(result.reward == 1.0 for result in results)
        assert not looping.done()
        assert pool.counters.retries["handed_over"] > 0
        assert pool.counters.calls == 20
        looping.cancel()


async def test_a_call_that_was_handed_over_and_scored_twice_is_answered_and_counted_once(
    start_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B19"""

    async def lost(worker: WorkerProcess, value: object) -> None:
        assert value == SKIP_REST

    async with start_pool(workers=2, timeout_s=30.0) as pool:
        monkeypatch.setattr(WorkerProcess, "send", lost)  # the workers go on with what they have
        results = await score_all(pool, ["slow", *map(str, range(20)), "slow", *map(str, range(20))])
        assert [result.reward for result in results] == [0.0, *map(float, range(20))] * 2
        assert pool.counters.calls == 42
        assert pool.counters.retries["handed_over"] > 0


async def test_followers_of_a_slow_call_that_is_killed_are_not_queued_twice(
    start_pool: Callable[..., RewardPool],
) -> None:
    """behaviour: B19"""
    async with start_pool(workers=2) as pool:
        results = await score_all(pool, ["loop", *map(str, range(40))])
        assert [result.reward for result in results] == [None, *map(float, range(40))]
        assert pool.counters.retries["innocent"] == 0
        assert pool.counters.calls == 41


async def test_a_worker_that_was_killed_from_outside_costs_no_call(
    start_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    """behaviour: B44"""
    async with start_pool() as pool:
        async with asyncio.timeout(60):
            result = await pool.score(ask("crash once", str(tmp_path / "crashed")))
        assert result.state is RewardState.FAILED  # what it raised the second time, not CRASHED
        assert pool.counters.retries["crash"] == 1
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert [result.reward for result in await score_all(pool, ["1", "2"])] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("nan", "nan"), ("inf", "inf"), ("string", "'1.0'"), ("none", "None"), ("raise", "ValueError: as asked")],
)
async def test_a_failed_reward_keeps_its_worker_and_says_what_came_back(
    start_pool: Callable[..., RewardPool], fault: str, said: str
) -> None:
    """behaviour: B20"""
    async with start_pool() as pool:
        before = pool.worker_pids
        result = await pool.score(ask(fault))
        assert (result.state, result.reward) == (RewardState.FAILED, None)
        assert result.error is not None and said in result.error and "own.py:f" in result.error
        assert (await pool.score(ask("1"))).reward == 1.0
        assert pool.worker_pids == before


async def test_a_worker_loads_neither_torch_nor_the_config_package(start_pool: Callable[..., RewardPool]) -> None:
    async with start_pool() as pool:
        assert (await pool.score(ask("torch"))).reward == 0.0


async def test_a_worker_with_an_overlong_penalty_loads_no_torch(start_pool: Callable[..., RewardPool]) -> None:
    program = (
        "import sys; from pathlib import Path; from relax.rewards.compose import build_spec;"
        "build_spec({'parts': [], 'overlong': {'max_tokens': 4, 'buffer_tokens': 2, 'penalty': 1.0}}, Path());"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


async def test_what_user_code_prints_or_reads_never_reaches_the_pipes(start_pool: Callable[..., RewardPool]) -> None:
    async with start_pool() as pool:
        assert (await pool.score(ask("print"))).reward == 0.0
        assert (await pool.score(ask("1"))).reward == 1.0


async def test_a_killed_worker_takes_its_own_children_along(
    start_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    """behaviour: B33"""
    async with start_pool() as pool:
        note = tmp_path / "pid"
        result = await pool.score(ask("spawn", str(note)))
        assert result.state is RewardState.TIMEOUT
        assert gone(int(note.read_text()))


async def test_a_worker_that_keeps_memory_is_replaced_between_batches(start_pool: Callable[..., RewardPool]) -> None:
    """behaviour: B19"""
    async with start_pool() as pool:
        await pool.score(ask("leak"))
        assert (await pool.score(ask("1"))).reward == 1.0
        assert pool.counters.worker_restarts == {"memory": 1}


async def test_thousands_of_calls_at_once_are_each_answered_once(start_pool: Callable[..., RewardPool]) -> None:
    async with start_pool() as pool:
        results = await score_all(pool, [str(i) for i in range(5000)])
        assert [result.reward for result in results] == [float(i) for i in range(5000)]
        assert pool.counters.calls == 5000
        assert pool.queued == 0


async def test_close_leaves_no_process_and_fails_open_calls(start_pool: Callable[..., RewardPool]) -> None:
    """behaviour: B33"""
    pool = start_pool(workers=2, timeout_s=30.0)
    await pool.start()
    pids = pool.worker_pids
    assert len(pids) == 2
    open_calls = [asyncio.create_task(pool.score(ask(text))) for text in ("loop", "loop", "loop")]
    while pool.queued:
        await asyncio.sleep(0)
    await pool.close()
    outcomes = await asyncio.gather(*open_calls, return_exceptions=True)
    assert all(isinstance(outcome, RewardPoolError) for outcome in outcomes)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RewardPoolError, match="closed"):
        await pool.score(ask("1"))
    await pool.close()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, busy: bool) -> None:
    """behaviour: B33"""
    (tmp_path / "own.py").write_text(OWN)
    program = f"""
import asyncio
from pathlib import Path
from relax.config.roles import RewardConfig
from relax.rewards.base import RewardRequest
from relax.rewards.pool import RewardPool

async def main():
    config = RewardConfig.model_validate({{"parts": [{{"name": "own.py:f"}}], "timeout_s": 600}})
    pool = RewardPool(config, max_response_tokens=1, base=Path({str(tmp_path)!r}))
    await pool.start()
    call = asyncio.create_task(pool.score(RewardRequest({{}}, "deaf"))) if {busy} else None
    while call and pool.queued:
        await asyncio.sleep(0)
    print(*pool.worker_pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait(timeout=30)
    _, alive = psutil.wait_procs([worker], timeout=30)
    assert not alive


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise RuntimeError('at import')", "at import"), ("def g(): pass", "f"), ("import os; os._exit(9)", "code 9")],
)
async def test_a_function_that_does_not_load_stops_the_start_with_its_own_words(
    start_pool: Callable[..., RewardPool], tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    pool = start_pool()
    with pytest.raises(RewardConfigError, match=said):
        await pool.start()
    assert pool.worker_pids == frozenset()


async def test_a_pool_whose_workers_do_not_restart_says_so_to_every_call(
    start_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    """behaviour: B20"""
    async with start_pool() as pool:
        (tmp_path / "own.py").write_text("raise RuntimeError('edited meanwhile')")
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(pool.score(ask("exit")), pool.score(ask("1")), return_exceptions=True)
        assert all("edited meanwhile" in str(outcome) for outcome in outcomes)
        with pytest.raises(RewardPoolError, match="edited meanwhile"):
            await pool.score(ask("1"))


async def test_a_caller_that_gave_up_costs_nothing(start_pool: Callable[..., RewardPool]) -> None:
    async with start_pool() as pool:
        given_up = [asyncio.create_task(pool.score(ask("1"))) for _ in range(3)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        assert (await pool.score(ask("2"))).reward == 2.0
        assert pool.counters.calls == 1


async def test_a_stalled_event_loop_blames_no_call(
    start_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B19"""
    async with start_pool(timeout_s=0.2) as pool:
        worker = next(iter(pool._workers))
        receive = worker.receive

        async def after_a_stall() -> Any:
            monkeypatch.setattr(worker, "receive", receive)
            # The answer is read only once the limit is over, as it is after a stall of the loop.
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(worker, "receive", after_a_stall)
        result = await pool.score(ask("1"))
        assert result.reward == 1.0
        assert not pool.counters.worker_restarts


async def test_a_label_that_is_no_json_is_refused_to_its_caller_only(start_pool: Callable[..., RewardPool]) -> None:
    async with start_pool() as pool:
        with pytest.raises(TypeError):
            await pool.score(ask("1", object()))
        assert (await pool.score(ask("1"))).reward == 1.0


def test_batches_shrink_with_slow_calls_and_leave_work_for_other_workers() -> None:
    assert batch_size(queued=1000, workers=1, mean_call_s=0.0) == MAX_BATCH
    assert batch_size(queued=10, workers=4, mean_call_s=0.0) == 3
    assert batch_size(queued=1000, workers=1, mean_call_s=0.01) == int(pool_module.BATCH_TARGET_S / 0.01)
    assert batch_size(queued=1000, workers=1, mean_call_s=10.0) == 1


def gone(pid: int) -> bool:
    """Whether a process is gone or only a zombie that waits for its (init) parent."""
    try:
        process = psutil.Process(pid)
        process.wait(timeout=30)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_died_with_nothing_to_do_is_replaced_under_serves_event_loop_too(tmp_path: Path) -> None:
    """behaviour: B19"""
    uvloop = pytest.importorskip("uvloop")
    (tmp_path / "own.py").write_text(OWN)
    config = RewardConfig.model_validate({"parts": [{"name": "own.py:f"}], "workers": 1})

    async def work() -> RewardState:
        async with RewardPool(config, max_response_tokens=8, base=tmp_path) as pool:
            [pid] = pool.worker_pids
            os.kill(pid, signal.SIGSEGV)
            [worker] = pool._workers
            async with asyncio.timeout(60):
                await worker._process.wait()
                return (await pool.score(ask("print"))).state

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(work()) is RewardState.OK
    finally:
        loop.close()
