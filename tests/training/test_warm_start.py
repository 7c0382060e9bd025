from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax.config.actor import ActorConfig, WarmStartConfig
from relax.config.data import DataConfig
from relax.training.torch_backend import TorchBackend
from relax.training.warm_start import warm_start, warm_started_model

# Copy two tokens, then end with 0.
EXAMPLES = [([a, b, 15], [a, b, 0]) for a in range(1, 5) for b in range(1, 5)]


def test_warm_start_learns_the_responses(make_backend: Callable[..., TorchBackend]) -> None:
    """behaviour: B3."""
    backend = make_backend({"lr": 1e-2}, total_steps=60)
    results = warm_start(backend, EXAMPLES, steps=60, batch=16, micro_batch_tokens=1000, seed=1)
    assert results[0].loss > 1.5
    assert results[-1].loss < 0.3


def test_every_example_is_seen_before_any_is_repeated(make_backend: Callable[..., TorchBackend]) -> None:
    """behaviour: B12. And the order is a function of the seed."""
    seen: list[tuple[int, ...]] = []

    class Recorder:
        def step(self, batches: object, _loss: object) -> None:
            for batch in batches:  # type: ignore[attr-defined]
                seen.extend(tuple(row) for row in batch.tokens.tolist())

    for _ in range(2):
        warm_start(Recorder(), EXAMPLES, steps=4, batch=4, micro_batch_tokens=1000, seed=1)  # type: ignore[arg-type]
    assert sorted(seen[:16]) == sorted((*prompt, *response) for prompt, response in EXAMPLES)
    assert seen[:16] == seen[16:]


def test_no_examples_is_an_error() -> None:
    """behaviour: B14."""
    with pytest.raises(ValueError, match="no labelled examples"):
        warm_start(None, [], steps=1, batch=1, micro_batch_tokens=100, seed=1)  # type: ignore[arg-type]


def test_a_warm_started_model_is_made_once_and_never_half(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour: B13. An attempt that fails leaves nothing; the next succeeds; a third returns the same."""
    config = ActorConfig(warm_start=WarmStartConfig(steps=2, batch=4, data=DataConfig(task="copy")))
    target = tmp_path / "warm"

    def build() -> Path:
        return warm_started_model(config, model_folder, target, EXAMPLES, seed=1, threads=1)

    def disk_full(_self: TorchBackend, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, "export", disk_full)
        with pytest.raises(OSError, match="no space"):
            build()
    assert list(tmp_path.iterdir()) == []

    assert build() == target
    first = (target / "model.safetensors").read_bytes()
    assert first != (model_folder / "model.safetensors").read_bytes()
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    build()
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
