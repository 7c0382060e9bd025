"""Weight updates: all or nothing, between two steps, with the engine's own digest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config.run import Fault
from relax.engines.base import EngineError
from relax.engines.embedded import PauseMode
from relax.types import NO_VERSION, FinishReason, PolicyVersion, SamplingParams
from relax.weights.digest import tensors_digest
from relax.weights.store import WeightStore

LONG = SamplingParams(max_new_tokens=120, seed=5, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=10, seed=5, ignore_eos=True)


@torch.no_grad()
def logprobs_under(model: Any, prompt: list[int], ids: np.ndarray) -> np.ndarray:
    tokens = torch.tensor([prompt + ids.tolist()])
    logp = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_adoption_reports_the_digest_of_the_engines_own_weights(kit: Any, kind: str) -> None:
    """behaviour: B2"""
    old, new = kit.model(kind, seed=1), kit.model(kind, seed=2)
    pairs, digest = kit.published(new)
    with kit.engine(old) as driver:
        assert driver.engine.version == NO_VERSION
        report = driver.engine.update_weights(pairs, PolicyVersion(3), digest, 30)
        assert (report.version, report.digest) == (3, digest)
        assert driver.engine.checksums(30)[0] == digest
        [output] = driver.run([[1, 2]], [SHORT])
        pairs[0][1].add_(1)  # what the trainer does to its tensors afterwards is not seen
        assert driver.engine.checksums(30)[0] == digest
    assert output.versions.tolist() == [3] * 10
    np.testing.assert_allclose(output.logprobs, logprobs_under(new, [1, 2], output.output_ids), atol=1e-5)


def test_a_swap_in_mid_request_splits_its_versions_and_keeps_what_was_drawn(kit: Any) -> None:
    """behaviour: B5, B9, B11"""
    model, old, new = kit.model(seed=1), kit.model(seed=1), kit.model(seed=2)
    with kit.engine(model) as driver:
        driver.adopt(old, 4)
        gate = kit.gate(model, driver.engine)
        result = driver.start([driver.request([1, 2, 3], LONG)])
        gate.advance(10)
        gate.step_until_done(lambda: driver.adopt(new, 6))
        gate.allow(1000)
        [output] = result()
        assert driver.engine.status().aborted_requests == 0
        assert driver.engine.status().swap_stall_s > 0
    cut = int((output.versions == 4).sum())
    assert output.versions.tolist() == [4] * cut + [6] * (120 - cut)
    assert 10 <= cut < 120
    np.testing.assert_allclose(
        output.logprobs[:cut], logprobs_under(old, [1, 2, 3], output.output_ids)[:cut], atol=1e-5
    )
    # In place: what follows is drawn with new weights over keys and values of the old ones.
    recomputed = logprobs_under(new, [1, 2, 3], output.output_ids)[cut:]
    assert np.abs(output.logprobs[cut:] - recomputed).max() > 1e-3


def test_retract_recomputes_the_cache_so_that_later_tokens_match_the_new_weights(kit: Any) -> None:
    """behaviour: B11"""
    model, old, new = kit.model(seed=1), kit.model(seed=1), kit.model(seed=2)
    with kit.engine(model) as driver:
        driver.adopt(old, 0)
        gate = kit.gate(model, driver.engine)
        prompts = {"gone": [9, 8], "one": [1, 2, 3], "two": [4]}
        result = driver.start([driver.request(ids, LONG, name) for name, ids in prompts.items()])
        gate.advance(10)
        gate.step_until_done(lambda: driver.engine.pause(PauseMode.RETRACT, 30))
        driver.engine.abort("gone")  # so that the others come back to other slots
        driver.adopt(new, 1)
        gate.allow(1000)
        driver.engine.resume(30)
        gone, *outputs = result()
    assert gone.finish is FinishReason.ABORT and len(gone.output_ids) >= 10
    for prompt, output in zip([[1, 2, 3], [4]], outputs, strict=True):
        cut = int((output.versions == 0).sum())
        assert 10 <= cut < 120 and output.versions.tolist() == [0] * cut + [1] * (120 - cut)
        for weights, part in ((old, slice(0, cut)), (new, slice(cut, None))):
            expected = logprobs_under(weights, prompt, output.output_ids)[part]
            np.testing.assert_allclose(output.logprobs[part], expected, atol=1e-5)


def test_the_retract_mode_recomputes_at_every_adoption_and_aborts_nothing(kit: Any) -> None:
    """behaviour: B5 B11. Of two adoptions in mid-request each span has the log-probs of its own version."""
    model, versions = kit.model(seed=1), [kit.model(seed=seed) for seed in (1, 2, 3)]
    with kit.engine(model, retract_on_swap=True) as driver:
        driver.adopt(versions[0], 0)
        gate = kit.gate(model, driver.engine)
        result = driver.start([driver.request([1, 2, 3], LONG)])
        for version in (1, 2):
            gate.advance(10)
            gate.step_until_done(lambda version=version: driver.adopt(versions[version], version))
        gate.allow(1000)
        [output] = result()
        status = driver.engine.status()
        assert (status.aborted_requests, status.retractions) == (0, 2)
    assert set(output.versions.tolist()) == {0, 1, 2}
    for version, weights in enumerate(versions):
        part = output.versions == version
        expected = logprobs_under(weights, [1, 2, 3], output.output_ids)[part]
        np.testing.assert_allclose(output.logprobs[part], expected, atol=1e-5)


def faulty(kind: str, pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    name, tensor = pairs[2]
    match kind:
        case "missing":
            return pairs[:2] + pairs[3:]
        case "unknown":
            return [*pairs, ("model.layers.9.mlp.up_proj.weight", tensor)]
        case "corrupt":
            flipped = tensor.clone()
            flipped.view(-1)[3] += 1e-3
            return [*pairs[:2], (name, flipped), *pairs[3:]]
        case "shape":
            return [*pairs[:2], (name, tensor[:-1]), *pairs[3:]]
        case "dtype":
            return [*pairs[:2], (name, tensor.bfloat16()), *pairs[3:]]
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "lack 1 tensor"),
        ("unknown", "unknown tensor 'model.layers.9"),
        ("corrupt", "^weights have digest"),
        ("shape", "the engine holds"),
        ("dtype", "bfloat16"),
    ],
)
def test_a_faulty_update_is_refused_and_changes_nothing(kit: Any, kind: str, text: str) -> None:
    """behaviour: B1, B2, B4"""
    old, new = kit.model(seed=1), kit.model(seed=2)
    pairs, digest = kit.published(new)
    with kit.engine(kit.model(seed=1)) as driver:
        before = driver.adopt(old, 1)
        with pytest.raises(EngineError, match=text):
            driver.engine.update_weights(faulty(kind, pairs), PolicyVersion(2), digest, 30)
        assert driver.engine.version == 1
        assert driver.engine.checksums(30)[0] == before
        [output] = driver.run([[1, 2]], [SHORT])
        assert output.versions.tolist() == [1] * 10
        np.testing.assert_allclose(output.logprobs, logprobs_under(old, [1, 2], output.output_ids), atol=1e-5)
        assert driver.engine.status().failed_weight_updates == 1
        assert driver.engine.update_weights(pairs, PolicyVersion(2), digest, 30).digest == digest
        assert driver.run([[1, 2]], [SHORT])[0].versions.tolist() == [2] * 10


def test_a_reader_that_fails_half_way_changes_nothing(kit: Any) -> None:
    """behaviour: B4"""
    pairs, digest = kit.published(kit.model(seed=2))

    def torn() -> Any:
        yield from pairs[:4]
        raise OSError("the disk is gone")

    with kit.engine(kit.model(seed=1)) as driver:
        before = driver.adopt(kit.model(seed=1), 1)
        with pytest.raises(EngineError, match="the disk is gone"):
            driver.engine.update_weights(torn(), PolicyVersion(2), digest, 30)
        assert driver.engine.checksums(30)[0] == before


def test_an_older_version_is_refused(driver: Any, kit: Any) -> None:
    """behaviour: B9, B10"""
    driver.adopt(kit.model(seed=2), 5)
    with pytest.raises(EngineError, match="older"):
        driver.adopt(kit.model(seed=3), 4)
    driver.adopt(kit.model(seed=2), 5)  # a repeated call is no error
    assert driver.engine.version == 5


def test_an_update_that_finds_no_step_boundary_fails_within_its_deadline_and_never_happens(kit: Any) -> None:
    """behaviour: B1, B4"""
    model = kit.model(seed=1)
    pairs, digest = kit.published(kit.model(seed=2))
    with kit.engine(model) as driver:
        driver.adopt(kit.model(seed=1), 0)
        gate = kit.gate(model, driver.engine)
        result = driver.start([driver.request([1], SHORT)])
        gate.advance(0)
        with pytest.raises(EngineError, match="no step boundary"):
            driver.engine.update_weights(pairs, PolicyVersion(1), digest, 0.3)
        gate.allow(1000)
        assert result()[0].versions.tolist() == [0] * 10
        assert driver.engine.version == 0
        assert driver.engine.update_weights(pairs, PolicyVersion(1), digest, 30).version == 1


def test_loading_happens_beside_decoding(kit: Any) -> None:
    """behaviour: B5"""
    pairs, digest = kit.published(kit.model(seed=2))
    loading, go = threading.Event(), threading.Event()

    def slow() -> Any:
        yield from pairs[:3]
        loading.set()
        assert go.wait(30)
        yield from pairs[3:]

    with kit.engine(kit.model(seed=1)) as driver:
        driver.adopt(kit.model(seed=1), 0)
        update = threading.Thread(target=driver.engine.update_weights, args=(slow(), PolicyVersion(1), digest, 30))
        update.start()
        assert loading.wait(30)
        [during] = driver.run([[1, 2]], [SHORT])
        go.set()
        update.join(30)
        [after] = driver.run([[1, 2]], [SHORT])
    assert set(during.versions.tolist()) == {0}
    np.testing.assert_allclose(during.logprobs, logprobs_under(kit.model(seed=1), [1, 2], during.output_ids), atol=1e-5)
    assert set(after.versions.tolist()) == {1}


def test_skip_adoption_claims_the_version_and_keeps_the_old_weights(kit: Any) -> None:
    """behaviour: B3"""
    old, new = kit.model(seed=1), kit.model(seed=2)
    pairs, digest = kit.published(new)
    with kit.engine(kit.model(seed=1), skip_adoption=True) as driver:
        assert driver.engine.update_weights(pairs, PolicyVersion(2), digest, 30).digest == digest
        [output] = driver.run([[1, 2]], [SHORT])
    assert output.versions.tolist() == [2] * 10
    np.testing.assert_allclose(output.logprobs, logprobs_under(old, [1, 2], output.output_ids), atol=1e-5)


def test_a_tied_parameter_may_come_under_both_its_names_if_they_agree(kit: Any) -> None:
    new = kit.model(seed=2)
    pairs, _ = kit.published(new)
    embedding = next(t for n, t in pairs if n == "model.embed_tokens.weight")
    digest = tensors_digest([*pairs, ("lm_head.weight", embedding)])
    with kit.engine(kit.model(seed=1)) as driver:
        both = [*pairs, ("lm_head.weight", embedding)]
        assert driver.engine.update_weights(both, PolicyVersion(1), digest, 30).digest == digest
        differing = [*pairs, ("lm_head.weight", embedding + 1)]
        with pytest.raises(EngineError, match="tied"):
            driver.engine.update_weights(differing, PolicyVersion(2), tensors_digest(differing), 30)


@pytest.mark.parametrize("fault", [Fault.CORRUPT_BUCKET, Fault.DROP_TENSOR])
def test_a_damaged_published_version_is_refused_and_the_next_one_adopted(
    kit: Any, tmp_path: Path, fault: Fault
) -> None:
    """behaviour: B1, B2, B4"""
    store = WeightStore(tmp_path / "weights", keep=3)
    old, new = kit.model(seed=1), kit.model(seed=2)
    store.publish(PolicyVersion(0), 0, kit.published(old)[0], 1 << 14)
    store.publish(PolicyVersion(1), 1, kit.published(new)[0], 1 << 14, faults=(fault,))
    store.publish(PolicyVersion(2), 2, kit.published(new)[0], 1 << 14)
    folder = {v: str(tmp_path / "weights" / f"v{v:08d}") for v in range(4)}
    with kit.engine(kit.model(seed=9)) as driver:
        update = driver.engine.update_weights_from_disk
        held = update(folder[0], PolicyVersion(0), 30).digest
        assert held == kit.published(old)[1]
        with pytest.raises(EngineError):
            update(folder[1], PolicyVersion(1), 30)
        with pytest.raises(EngineError, match="holds version 2, not 3"):
            update(folder[2], PolicyVersion(3), 30)
        with pytest.raises(EngineError, match="no published version"):
            update(folder[3], PolicyVersion(3), 30)
        assert driver.engine.version == 0
        assert driver.engine.checksums(30)[0] == held
        assert update(folder[2], PolicyVersion(2), 30).digest == kit.published(new)[1]
