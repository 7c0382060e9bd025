"""The contract of the protocol, the same over a call in the process and over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from relax.config.run import Fault
from relax.engines.base import EngineError, Transport
from relax.engines.client import SglangClient
from relax.engines.server import HttpServer
from relax.engines.service import EngineService
from relax.engines.transports import HttpTransport, LocalTransport
from relax.types import FinishReason, Json, LogprobMode, PolicyVersion, SamplingParams
from relax.weights.store import WeightStore

PROMPT = np.array([1, 2, 3], dtype=np.int32)
LONG = SamplingParams(max_new_tokens=200, seed=4, ignore_eos=True)


class Stand:
    """One engine at version 0, its server, a raw transport and the client over it."""

    def __init__(self, kit: Any, driver: Any, model: Any, transport: Transport, url: str | None) -> None:
        self.kit, self.driver, self.model, self.transport, self.url = kit, driver, model, transport, url
        self.client = SglangClient(transport)

    async def ask(self, method: str, path: str, body: Json = None) -> tuple[int, Json]:
        return await self.transport.request(method, path, body, 30)

    async def eventually(self, holds: Callable[[], bool], gate: Any = None) -> None:
        async with asyncio.timeout(30):
            while not holds():
                if gate is not None:
                    gate.let_commands_pass()
                await asyncio.sleep(0.001)

    async def forwards_until(self, gate: Any, task: asyncio.Future[Any]) -> Any:
        """Grant a forward whenever the decode thread has something to do at its next step."""
        await self.eventually(task.done, gate)
        return task.result()


@pytest.fixture(params=["local", "http"])
async def stand(request: pytest.FixtureRequest, kit: Any) -> AsyncIterator[Stand]:
    model = kit.model(seed=1)
    with ExitStack() as stack:
        driver = stack.enter_context(kit.engine(model))
        driver.adopt(kit.model(seed=1), 0)
        service = EngineService(driver.engine)
        if request.param == "local":
            yield Stand(kit, driver, model, LocalTransport(service), None)
            return
        server = HttpServer(service)
        server.start(30)
        stack.callback(server.stop, 30)
        transport = HttpTransport(server.url)
        yield Stand(kit, driver, model, transport, server.url)
        await transport.close()


@pytest.fixture
def store(kit: Any, tmp_path: Path) -> Iterator[WeightStore]:
    """Versions 1 (good), 2 (damaged), 3 (good)."""
    store = WeightStore(tmp_path / "weights", keep=5)
    pairs = kit.published(kit.model(seed=2))[0]
    store.publish(PolicyVersion(1), 1, pairs, 1 << 14)
    store.publish(PolicyVersion(2), 2, pairs, 1 << 14, faults=(Fault.CORRUPT_BUCKET,))
    store.publish(PolicyVersion(3), 3, pairs, 1 << 14)
    yield store


def folder(store: WeightStore, version: int) -> str:
    return str(store.root / f"v{version:08d}")


@pytest.mark.parametrize("mode", list(LogprobMode))
async def test_generation_carries_ids_log_probs_versions_and_text(stand: Stand, mode: LogprobMode) -> None:
    """behaviour: B9, B23"""
    sampling = SamplingParams(
        temperature=0.8, top_k=4, top_p=0.9, max_new_tokens=20, seed=2, ignore_eos=True, logprob_mode=mode
    )
    out = await stand.client.generate(PROMPT, sampling, request_id="a", deadline_s=30)
    [direct] = stand.driver.run([PROMPT.tolist()], [sampling])
    assert out.output_ids.dtype == out.versions.dtype == np.int32 and out.logprobs.dtype == np.float32
    assert out.output_ids.tolist() == direct.output_ids.tolist()
    expected = direct.logprobs if mode is LogprobMode.TEMPERATURE else direct.sampling_logprobs
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-6)
    assert out.versions.tolist() == [0] * 20
    assert out.finish_reason is FinishReason.LENGTH
    assert out.text == stand.kit.tokenizer().decode(out.output_ids.tolist())


async def test_concurrent_requests_equal_single_ones(stand: Stand) -> None:
    settings = [SamplingParams(max_new_tokens=5 + i % 7, seed=i) for i in range(40)]
    prompts = [np.arange(1 + i % 5, dtype=np.int32) for i in range(40)]
    many = await asyncio.gather(
        *(
            stand.client.generate(p, s, request_id=str(i), deadline_s=60)
            for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
        )
    )
    single = stand.driver.run([p.tolist() for p in prompts], settings)
    assert [o.output_ids.tolist() for o in many] == [o.output_ids.tolist() for o in single]


async def test_the_raw_answer_has_sglangs_shape(stand: Stand) -> None:
    body = {
        "input_ids": [1, 2, 3],
        "rid": "abc",
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "sampling_seed": 1},
        "return_logprob": True,
    }
    status, answer = await stand.ask("POST", "/generate", body)
    assert status == 200
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in ids]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert meta["weight_version"] == "0" and meta["id"] == "abc"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 3)
    assert "output_token_sampling_logprobs" not in meta


async def test_score_gives_the_models_log_probs_of_given_tokens(stand: Stand) -> None:
    """behaviour: B6"""
    sequences = [np.array(ids, dtype=np.int32) for ids in ([1, 2, 3, 9, 4, 4], [5, 6, 7], [9, 9, 1, 2, 3, 8])]
    scored = await stand.client.score(sequences, deadline_s=30)
    assert len(scored) == 3
    for tokens, scores in zip(sequences, scored, strict=True):
        ids = torch.from_numpy(tokens).long()[None]
        with torch.no_grad():
            logp = stand.kit.model(seed=1)(input_ids=ids).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(scores[1:], logp.gather(1, ids[0, 1:, None])[:, 0].numpy(), atol=1e-5)
        assert scores[0] == 0 and scores.dtype == np.float32


async def test_a_batch_with_n_answers_a_list_in_order_with_different_draws(stand: Stand) -> None:
    one = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 3, "n": 2}
    two = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [[1, 2], [3]], "rid": ["x", "y"], "sampling_params": [one, two]}
    status, answers = await stand.ask("POST", "/generate", body)
    assert status == 200
    assert [a["meta_info"]["id"] for a in answers] == ["x_0", "x_1", "y"]
    assert [len(a["output_ids"]) for a in answers] == [6, 6, 4]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


async def test_a_stop_string_is_cut_from_the_text_and_not_from_the_ids(stand: Stand) -> None:
    free = await stand.client.generate(PROMPT, LONG, request_id="a", deadline_s=30)
    stop = free.text[5:8]
    sampling = SamplingParams(max_new_tokens=200, seed=4, ignore_eos=True, stop=(stop,))
    out = await stand.client.generate(PROMPT, sampling, request_id="b", deadline_s=30)
    assert out.finish_reason is FinishReason.STOP
    assert out.text == free.text[: free.text.index(stop)]
    assert out.output_ids.tolist() == free.output_ids[: free.text.index(stop) + 3].tolist()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (None, "input_ids"),
        ([1, 2], "dictionary"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [99]}, "outside [0, 32)"),
        ({"input_ids": [1 << 40]}, "outside [0, 32)"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.3}}, "min_p is not supported"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1000}}, "context of 256"),
        ({"input_ids": [1], "samplingparams": {}}, "samplingparams"),
        ({"input_ids": [1], "text": "hello"}, "text is not supported"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
    ],
)
async def test_a_bad_body_is_refused_with_its_reason(stand: Stand, body: Json, text: str) -> None:
    status, answer = await stand.ask("POST", "/generate", body)
    assert status == 400
    assert text in answer["error"]["message"]


async def test_neutral_values_of_unsupported_fields_are_accepted(stand: Stand) -> None:
    sampling = {"max_new_tokens": 2, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": True}
    body = {"input_ids": [1], "sampling_params": sampling, "logprob_start_len": -1, "return_routed_experts": False}
    assert (await stand.ask("POST", "/generate", body))[0] == 200


async def test_abort_of_one_and_of_all_returns_partial_outputs_of_equal_lengths(stand: Stand) -> None:
    """behaviour: B23"""
    gate = stand.kit.gate(stand.model, stand.driver.engine)
    tasks = [
        asyncio.ensure_future(stand.client.generate(PROMPT, LONG, request_id=f"r{i}", deadline_s=60)) for i in range(3)
    ]
    await stand.eventually(lambda: stand.driver.engine.status().running == 3, gate)
    await stand.client.abort("r1", deadline_s=30)
    first = await stand.forwards_until(gate, tasks[1])
    assert not tasks[0].done() and not tasks[2].done()
    await stand.client.abort(None, deadline_s=30)
    others = [await stand.forwards_until(gate, tasks[i]) for i in (0, 2)]
    for out in (first, *others):
        assert out.finish_reason is FinishReason.ABORT
        assert len(out.output_ids) == len(out.logprobs) == len(out.versions) < 200


async def test_a_caller_that_gives_up_frees_its_slot(stand: Stand) -> None:
    gate = stand.kit.gate(stand.model, stand.driver.engine)
    gate.allow(3)
    with pytest.raises(TimeoutError):
        await stand.client.generate(PROMPT, LONG, request_id="slow", deadline_s=0.3)
    await stand.eventually(lambda: stand.driver.engine.status().aborted_requests == 1, gate)
    assert stand.driver.engine.status().running == 0


async def test_pause_and_continue_hold_requests(stand: Stand) -> None:
    await stand.client.pause("retract", deadline_s=30)
    task = asyncio.ensure_future(stand.client.generate(PROMPT, LONG, request_id="a", deadline_s=60))
    await stand.eventually(lambda: stand.driver.engine.status().waiting == 1)
    assert (await stand.client.loads(deadline_s=30))["num_waiting_reqs"] == 1
    assert (await stand.client.server_info(deadline_s=30))["paused"] is True
    assert (await stand.ask("GET", "/health_generate"))[0] == 200
    assert not task.done()
    await stand.client.resume(deadline_s=30)
    assert len((await task).output_ids) == 200


async def test_pause_abort_ends_running_requests_and_flush_is_refused_while_some_run(stand: Stand) -> None:
    gate = stand.kit.gate(stand.model, stand.driver.engine)
    task = asyncio.ensure_future(stand.client.generate(PROMPT, LONG, request_id="a", deadline_s=60))
    await stand.eventually(lambda: stand.driver.engine.status().running == 1)
    assert (await stand.ask("POST", "/flush_cache"))[0] == 400
    pause = asyncio.ensure_future(stand.client.pause("abort", deadline_s=30))
    await stand.forwards_until(gate, pause)
    assert (await task).finish_reason is FinishReason.ABORT
    assert (await stand.ask("POST", "/flush_cache"))[0] == 200


async def test_update_from_disk_adopts_in_mid_request(stand: Stand, store: WeightStore) -> None:
    """behaviour: B2, B5, B9"""
    gate = stand.kit.gate(stand.model, stand.driver.engine)
    task = asyncio.ensure_future(stand.client.generate(PROMPT, LONG, request_id="a", deadline_s=60))
    await asyncio.to_thread(gate.advance, 5)
    call = stand.client.update_weights_from_disk(folder(store, 1), PolicyVersion(1), deadline_s=30)
    report = await stand.forwards_until(gate, asyncio.ensure_future(call))
    assert report.version == 1 and report.digest == stand.kit.published(stand.kit.model(seed=2))[1]
    gate.allow(1000)
    out = await task
    assert set(out.versions.tolist()) == {0, 1}
    assert (np.diff(out.versions) >= 0).all()
    assert (await stand.ask("POST", "/weights_checker", {"action": "checksum"}))[1]["weight_digest"] == report.digest
    assert (await stand.ask("GET", "/model_info"))[1]["weight_version"] == "1"


async def test_a_refused_update_says_why_and_the_next_one_works(stand: Stand, store: WeightStore) -> None:
    """behaviour: B1, B4"""
    with pytest.raises(EngineError, match="digest"):
        await stand.client.update_weights_from_disk(folder(store, 2), PolicyVersion(2), deadline_s=30)
    info = await stand.client.server_info(deadline_s=30)
    assert info["weight_version"] == "0" and info["failed_weight_updates"] == 1
    report = await stand.client.update_weights_from_disk(folder(store, 3), PolicyVersion(3), deadline_s=30)
    assert report.version == 3
    for body, text in (
        ({"weight_version": "1"}, "model_path"),
        ({"model_path": "x", "weight_version": "new"}, "'new'"),
    ):
        status, answer = await stand.ask("POST", "/update_weights_from_disk", body)
        assert status == 400 and text in answer["error"]["message"]


async def test_sglangs_update_session_is_accepted(stand: Stand) -> None:
    assert (await stand.ask("POST", "/begin_weight_update", {"selector": "all"}))[1]["success"]
    assert (await stand.ask("POST", "/end_weight_update", {}))[1]["success"]


async def test_reports_count_what_happened(stand: Stand) -> None:
    await stand.client.generate(
        PROMPT, SamplingParams(max_new_tokens=7, ignore_eos=True), request_id="a", deadline_s=30
    )
    info = await stand.client.server_info(deadline_s=30)
    assert info["generated_tokens"] == 7 and info["prompt_tokens"] == 3 and info["busy_s"] > 0
    assert {"swap_stall_s", "max_running_requests", "internal_states", "version"} <= info.keys()
    load = await stand.client.loads(deadline_s=30)
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (0, 0, 8)
    assert {"gen_throughput", "token_usage", "utilization"} <= load.keys()
    text = (await stand.ask("GET", "/metrics"))[1]
    lines = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in text.splitlines() if not line.startswith("#")}
    assert float(lines["sglang:generation_tokens_total"]) == 7
    assert float(lines["sglang:num_requests_total"]) == 1
    for name in ("num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage", "max_total_num_tokens"):
        assert f"sglang:{name}" in lines


async def test_health_tells_a_crash_and_requests_fail_with_its_text(stand: Stand) -> None:
    for path in ("/ready", "/health", "/health_generate"):
        assert (await stand.ask("GET", path))[0] == 200

    def explode(*_: object) -> None:
        raise RuntimeError("the memory caught fire")

    stand.model.register_forward_pre_hook(explode)
    with pytest.raises(EngineError, match="the memory caught fire"):
        await stand.client.generate(PROMPT, LONG, request_id="a", deadline_s=30)
    with pytest.raises(EngineError, match="the memory caught fire"):
        await stand.client.generate(PROMPT, LONG, request_id="b", deadline_s=30)
    with pytest.raises(EngineError, match="the memory caught fire"):
        await stand.client.health(deadline_s=30)
    assert (await stand.ask("GET", "/health_generate"))[0] == 503


async def test_an_unknown_path_is_404(stand: Stand) -> None:
    assert (await stand.ask("GET", "/nothing"))[0] == 404


async def test_a_stream_is_cumulative_and_ends_with_a_finish_reason_and_done(stand: Stand) -> None:
    body = {"input_ids": [1, 2], "stream": True, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    if stand.url is None:
        assert (await stand.ask("POST", "/generate", body))[0] == 400
        return
    async with httpx.AsyncClient(base_url=stand.url, trust_env=False) as http:
        response = await http.post("/generate", json=body)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert [len(part["output_ids"]) for part in parts] == [1, 2, 3, 4, 5]
    assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * 4
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(a["output_ids"] == b["output_ids"][:-1] for a, b in pairwise(parts))


async def test_a_body_that_is_no_json_is_400(stand: Stand) -> None:
    if stand.url is None:
        return
    async with httpx.AsyncClient(base_url=stand.url, trust_env=False) as http:
        response = await http.post("/generate", content=b"{nope")
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


async def test_a_server_that_is_gone_is_an_engine_error(kit: Any) -> None:
    with kit.engine(kit.model()) as driver:
        server = HttpServer(EngineService(driver.engine))
        server.start(30)
        server.stop(30)
    client = SglangClient(HttpTransport(server.url))
    with pytest.raises(EngineError, match="unreachable"):
        await client.server_info(deadline_s=5)
    await client.close()


def test_a_server_leaves_the_log_handlers_of_its_process_open(kit: Any) -> None:
    """Serve keeps the log of a replica in one, and asks it for its file when Serve's own controller comes up again: a
    closed one cost every rollout instance its life then.

    behaviour: B34
    """
    kept = MemoryHandler(10, target=logging.NullHandler())
    logging.getLogger("test.kept").addHandler(kept)
    try:
        with kit.engine(kit.model()) as driver:
            server = HttpServer(EngineService(driver.engine))
            server.start(30)
            server.stop(30)
        assert kept.target is not None
    finally:
        logging.getLogger("test.kept").removeHandler(kept)
