from __future__ import annotations

from pathlib import Path

import pytest

from relax.config.actor import ActorConfig
from relax.plugins import PluginError
from relax.training.build import BackendError, build_backend
from relax.training.torch_backend import TorchBackend

COMPLETE = """
class Mine:
    def __init__(self, config, model_folder, total_steps, seed, threads, *, trust_remote_code):
        self.given = (model_folder, total_steps, seed, threads, trust_remote_code)
    def logprobs(self): ...
    def step(self): ...
    def state_tensors(self): ...
    def save(self): ...
    def load(self): ...
    def export(self): ...
    def describe(self): ...
    def close(self): ...

class Partial:
    def step(self): ...
    def save(self): ...
"""


def build(name: str, folder: Path, base: Path | None = None) -> object:
    return build_backend(ActorConfig(backend=name), folder, 5, 1, 1, base=base)


def test_torch_is_known_by_name(model_folder: Path) -> None:
    """behaviour: B40."""
    backend = build("torch", model_folder)
    assert isinstance(backend, TorchBackend)
    assert backend.describe()["backend"] == "torch"


def test_an_own_class_is_built_from_a_file(tmp_path: Path) -> None:
    """behaviour: B40."""
    (tmp_path / "mine.py").write_text(COMPLETE)
    assert build("mine.py:Mine", Path("model"), tmp_path).given == (Path("model"), 5, 1, 1, False)  # type: ignore[attr-defined]


def test_an_incomplete_class_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    """behaviour: B40."""
    (tmp_path / "mine.py").write_text(COMPLETE)
    with pytest.raises(BackendError, match="lacks logprobs, state_tensors, load, export, describe, close"):
        build("mine.py:Partial", Path("model"), tmp_path)


@pytest.mark.parametrize("name", ["megatronn", "no.such.module:Backend", "relax.training.build:Nothing"])
def test_an_unknown_backend_is_refused(name: str) -> None:
    """behaviour: B40."""
    with pytest.raises(PluginError, match=name.split(":")[0]):
        build(name, Path("model"))
