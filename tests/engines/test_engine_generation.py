"""Continuous batching over the slot cache: agreement with the model's own forward, stops, aborts, failures."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from relax.engines.base import EngineError
from relax.engines.embedded import BadRequest, PauseMode
from relax.engines.requests import Output
from relax.types import FinishReason, LogprobMode, ModelError, SamplingParams

SETTINGS = [
    SamplingParams(max_new_tokens=24, seed=1),
    SamplingParams(max_new_tokens=9, temperature=0.5, seed=2),
    SamplingParams(max_new_tokens=31, temperature=1.4, top_k=5, seed=3),
    SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.8, seed=4),
    SamplingParams(max_new_tokens=80, temperature=0.9, top_k=8, top_p=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=0.0, seed=6),
    SamplingParams(max_new_tokens=1, seed=7),
    SamplingParams(max_new_tokens=24, seed=8),
]


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], output: Output, sampling: SamplingParams, mode: LogprobMode
) -> np.ndarray:
    """From one forward of the model over the finished sequence, without a cache."""
    ids = torch.tensor([prompt + output.output_ids.tolist()])
    z = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
    if mode is LogprobMode.SAMPLING and sampling.temperature > 0:
        if sampling.top_k > 0:
            z = z.masked_fill(z < z.topk(sampling.top_k).values[:, -1:], float("-inf"))
        ordered, index = z.sort(descending=True)
        p = ordered.softmax(-1)
        drop = (p.cumsum(-1) - p) >= sampling.top_p
        z = z.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))
    return z.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_log_probs_of_ragged_batches_equal_the_models_own(kit: Any, prompts: list[list[int]], kind: str) -> None:
    """behaviour: B6"""
    model = kit.model(kind)
    with kit.engine(kit.model(kind), slots=3) as driver:
        outputs = driver.run(prompts, SETTINGS)
    for prompt, output, sampling in zip(prompts, outputs, SETTINGS, strict=True):
        assert len(output.output_ids) == len(output.logprobs) == len(output.versions) > 0
        for mode, got in (
            (LogprobMode.TEMPERATURE, output.logprobs),
            (LogprobMode.SAMPLING, output.sampling_logprobs),
        ):
            np.testing.assert_allclose(got, reference_logprobs(model, prompt, output, sampling, mode), atol=1e-5)


def test_seeded_requests_give_the_same_tokens_batched_or_one_by_one(kit: Any, prompts: list[list[int]]) -> None:
    with kit.engine(kit.model(), slots=3) as driver:
        together = driver.run(prompts, SETTINGS)
        reverse = driver.run(prompts[::-1], SETTINGS[::-1])[::-1]
        alone = [driver.run([p], [s])[0] for p, s in zip(prompts, SETTINGS, strict=True)]
    for a, b, c in zip(together, reverse, alone, strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist() == c.output_ids.tolist()
        assert a.finish == c.finish


def test_a_seed_draws_the_same_continuation_from_a_partial_answer(kit: Any) -> None:
    sampling = SamplingParams(max_new_tokens=20, seed=9, ignore_eos=True)
    with kit.engine(kit.model()) as driver:
        [whole] = driver.run([[1, 2, 3]], [sampling])
        part = whole.output_ids[:8].tolist()
        rest = SamplingParams(max_new_tokens=12, seed=9, ignore_eos=True)
        [resumed] = driver.run([[1, 2, 3, *part]], [rest])
    assert part + resumed.output_ids.tolist() == whole.output_ids.tolist()


def test_greedy_follows_the_argmax_of_the_model(kit: Any) -> None:
    model = kit.model("llama")
    with kit.engine(kit.model("llama")) as driver:
        [output] = driver.run([[4, 9, 2]], [SamplingParams(temperature=0, max_new_tokens=15, ignore_eos=True)])
    ids = [4, 9, 2]
    with torch.no_grad():
        for _ in range(15):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert output.output_ids.tolist() == ids[3:]


def test_equal_prompts_are_computed_once_and_each_request_gets_its_own(kit: Any) -> None:
    model = kit.model()
    rows: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    mixed = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [4, 5], [1, 2, 3]]
    sampling = [SamplingParams(max_new_tokens=12, seed=i, ignore_eos=True) for i in range(6)]
    with kit.engine(model) as driver:
        together = driver.run(mixed, sampling)
        assert rows[:2] == [3, 6]
        alone = [driver.run([p], [s])[0] for p, s in zip(mixed, sampling, strict=True)]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.output_ids.tolist() == b.output_ids.tolist()


def test_end_token_stops_and_is_kept_unless_ignored(kit: Any) -> None:
    """behaviour: B24"""
    with kit.engine(kit.model()) as driver:
        free = SamplingParams(max_new_tokens=200, seed=3, temperature=1.5)
        deaf = SamplingParams(max_new_tokens=200, seed=3, temperature=1.5, ignore_eos=True)
        [stopped, ignored] = driver.run([[1, 2]] * 2, [free, deaf])
    assert stopped.finish is FinishReason.STOP and stopped.matched == kit.eos
    assert stopped.output_ids[-1] == kit.eos and kit.eos not in stopped.output_ids[:-1].tolist()
    assert ignored.finish is FinishReason.LENGTH and len(ignored.output_ids) == 200
    assert ignored.output_ids[: len(stopped.output_ids)].tolist() == stopped.output_ids.tolist()


def test_an_end_token_at_the_length_limit_counts_as_stop(kit: Any) -> None:
    with kit.engine(kit.model()) as driver:
        sampling = SamplingParams(max_new_tokens=200, seed=3, temperature=1.5)
        [stopped] = driver.run([[1, 2]], [sampling])
        exact = SamplingParams(max_new_tokens=len(stopped.output_ids), seed=3, temperature=1.5)
        [again] = driver.run([[1, 2]], [exact])
    assert again.finish is FinishReason.STOP


def test_stop_token_ids_and_stop_strings_end_a_request_and_leave_its_ids_as_drawn(kit: Any) -> None:
    tokenizer = kit.tokenizer()
    with kit.engine(kit.model()) as driver:
        base = SamplingParams(max_new_tokens=60, seed=12, ignore_eos=True)
        [free] = driver.run([[5, 6]], [base])
        ids = free.output_ids.tolist()
        text = tokenizer.decode(ids)
        stop = text[40:43]  # three tokens, far enough that only a tail is decoded
        with_string = SamplingParams(max_new_tokens=60, seed=12, ignore_eos=True, stop=("@@", stop))
        with_id = SamplingParams(max_new_tokens=60, seed=12, ignore_eos=True, stop_token_ids=(ids[7],))
        [by_string, by_id] = driver.run([[5, 6]] * 2, [with_string, with_id])
    end = text.index(stop) + len(stop)
    assert by_string.finish is FinishReason.STOP and by_string.matched == stop
    assert by_string.output_ids.tolist() == ids[:end]
    assert by_id.finish is FinishReason.STOP and by_id.matched == ids[7]
    assert by_id.output_ids.tolist() == ids[: ids.index(ids[7]) + 1]


def test_abort_of_one_returns_its_part_and_the_others_go_on(kit: Any) -> None:
    """behaviour: B23"""
    model = kit.model()
    sampling = [SamplingParams(max_new_tokens=50, seed=i, ignore_eos=True) for i in range(4)]
    with kit.engine(model, slots=3) as driver:
        gate = kit.gate(model, driver.engine)
        requests = [driver.request([1, i], s, f"r{i}") for i, s in enumerate(sampling)]
        result = driver.start(requests)  # r3 waits for a slot
        gate.advance(6)
        driver.engine.abort("r1")
        driver.engine.abort("r3")
        gate.allow(1000)
        kept, aborted, other, waiting = result()
        assert driver.engine.status().aborted_requests == 2
    assert aborted.finish is waiting.finish is FinishReason.ABORT
    assert 6 <= len(aborted.output_ids) <= 7
    assert len(aborted.output_ids) == len(aborted.logprobs) == len(aborted.sampling_logprobs) == len(aborted.versions)
    assert len(waiting.output_ids) == 0
    assert len(kept.output_ids) == len(other.output_ids) == 50
    with kit.engine(kit.model()) as driver:
        whole = driver.run([[1, i] for i in range(4)], sampling)
    assert kept.output_ids.tolist() == whole[0].output_ids.tolist()
    assert other.output_ids.tolist() == whole[2].output_ids.tolist()
    assert aborted.output_ids.tolist() == whole[1].output_ids[: len(aborted.output_ids)].tolist()


def test_abort_of_all_returns_every_part(kit: Any) -> None:
    model = kit.model()
    with kit.engine(model, slots=2) as driver:
        gate = kit.gate(model, driver.engine)
        sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
        result = driver.start([driver.request([1, 2], sampling, f"r{i}") for i in range(5)])
        gate.advance(5)
        driver.engine.abort(None)
        gate.allow(10)
        assert [o.finish for o in result()] == [FinishReason.ABORT] * 5
        assert driver.engine.status().running == 0


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_holds_every_request_and_changes_no_token(kit: Any, mode: PauseMode) -> None:
    model = kit.model()
    sampling = [SamplingParams(max_new_tokens=60, seed=i, ignore_eos=True) for i in range(3)]
    with kit.engine(model, slots=2) as driver:
        gate = kit.gate(model, driver.engine)
        requests = [driver.request([1, i], s, f"r{i}") for i, s in enumerate(sampling)]
        result = driver.start(requests)
        gate.advance(5)
        gate.step_until_done(lambda: driver.engine.pause(mode, 30))
        status = driver.engine.status()
        assert status.paused
        assert (status.running, status.waiting) == ((2, 1) if mode is PauseMode.IN_PLACE else (0, 3))
        gate.allow(1000)
        driver.engine.resume(30)
        outputs = result()
        assert requests[0].retractions == (0 if mode is PauseMode.IN_PLACE else 1)
    with kit.engine(kit.model()) as driver:
        whole = driver.run([[1, i] for i in range(3)], sampling)
    for a, b in zip(outputs, whole, strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_crash_of_the_decode_thread_fails_every_request_with_its_text(kit: Any) -> None:
    model = kit.model()
    calls: list[int] = []

    def explode(*_: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the memory caught fire")

    model.register_forward_pre_hook(explode)
    with kit.engine(model, slots=2) as driver:
        result = driver.start([driver.request([1], SamplingParams(ignore_eos=True), f"r{i}") for i in range(3)])
        with pytest.raises(EngineError, match="the memory caught fire"):
            result()
        driver.engine.close(30)
        assert not driver.engine.healthy()
        assert "the memory caught fire" in str(driver.engine.failure)
        with pytest.raises(EngineError, match="the memory caught fire"):
            driver.engine.submit([driver.request([1], SamplingParams())])
        with pytest.raises(EngineError, match="the memory caught fire"):
            driver.engine.pause(PauseMode.IN_PLACE, 30)


def test_non_finite_logits_fail_the_request_and_a_good_update_heals_the_engine(kit: Any) -> None:
    """behaviour: B45"""
    good, bad = kit.model(), kit.model()
    with torch.no_grad():
        bad.lm_head.weight[3] = float("nan")
    with kit.engine(kit.model()) as driver:
        driver.adopt(bad, 1)
        with pytest.raises(EngineError, match="non-finite logits at policy version 1"):
            driver.run([[1, 2]], [SamplingParams(ignore_eos=True)])
        assert driver.engine.status().generated_tokens == 1
        assert driver.engine.healthy()
        driver.adopt(good, 2)
        assert len(driver.run([[1, 2]], [SamplingParams(max_new_tokens=4, ignore_eos=True)])[0].output_ids) == 4


def test_an_idle_engine_takes_no_step(driver: Any) -> None:
    driver.run([[1, 2]], [SamplingParams(max_new_tokens=3, ignore_eos=True)])
    before = driver.engine.status()
    driver.engine.resume(30)  # a round trip through the decode thread
    after = driver.engine.status()
    assert (after.steps, after.busy_s, after.running, after.waiting) == (before.steps, before.busy_s, 0, 0)
    assert before.generated_tokens == 3 and before.busy_s > 0


def test_requests_that_cannot_be_served_are_refused(driver: Any) -> None:
    for ids, sampling, text in (
        ([], SamplingParams(), "empty"),
        ([32], SamplingParams(), "outside"),
        ([-1], SamplingParams(), "outside"),
        ([1] * 200, SamplingParams(max_new_tokens=57), "context of 256"),
    ):
        with pytest.raises(BadRequest, match=text):
            driver.request(ids, sampling)
    [full] = driver.run([[1] * 200], [SamplingParams(max_new_tokens=56, ignore_eos=True)])
    assert len(full.output_ids) == 56


def test_closing_ends_waiting_requests_with_an_error(kit: Any) -> None:
    model = kit.model()
    with kit.engine(model, slots=1) as driver:
        gate = kit.gate(model, driver.engine)
        result = driver.start([driver.request([1], SamplingParams(ignore_eos=True), f"r{i}") for i in range(2)])
        gate.advance(3)
        closing = threading.Thread(target=driver.engine.close, args=(30,))
        closing.start()
        while driver.engine.healthy():
            closing.join(0.001)
        gate.allow(1)
        closing.join(30)
        with pytest.raises(EngineError, match="closed"):
            result()
        with pytest.raises(EngineError, match="closed"):
            driver.engine.abort(None)


def test_a_model_whose_attention_the_cache_cannot_serve_is_refused(kit: Any) -> None:
    model = kit.model()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 16
    with pytest.raises(ModelError, match="sliding window"), kit.engine(model):
        pass
    with pytest.raises(ModelError, match="max_position_embeddings"), kit.engine(kit.model(), max_context=1024):
        pass
