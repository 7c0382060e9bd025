"""What the protocol's service asks of an engine in its own process, and the choice of one by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relax.config.roles import EngineConfig
from relax.config.run import Fault, RunConfig
from relax.engines.base import EngineError, WeightReport
from relax.types import FloatArray, IntArray, PolicyVersion, SamplingParams

if TYPE_CHECKING:
    from relax.engines.embedded import PauseMode
    from relax.engines.requests import Request
    from relax.engines.status import EngineStatus
    from relax.engines.stop_strings import DecodesTokens


class LocalEngine(Protocol):
    """Every method may be called from any thread; see `relax.engines.embedded` for what each does and raises."""

    @property
    def tokenizer(self) -> DecodesTokens: ...
    @property
    def model_path(self) -> str: ...
    @property
    def model_class(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def version(self) -> PolicyVersion: ...
    @property
    def paused(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    def start(self) -> None: ...
    def close(self, deadline_s: float) -> None: ...
    def healthy(self) -> bool: ...
    def check(self, prompt_ids: IntArray, sampling: SamplingParams) -> None: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_id: str | None) -> None: ...
    def pause(self, mode: PauseMode, deadline_s: float) -> None: ...
    def resume(self, deadline_s: float) -> None: ...
    def score(self, prompts: Sequence[IntArray], deadline_s: float) -> list[FloatArray]: ...
    def update_weights_from_disk(self, folder: str, version: PolicyVersion, deadline_s: float) -> WeightReport: ...
    def checksums(self, deadline_s: float) -> tuple[str, dict[str, str]]: ...
    def status(self) -> EngineStatus: ...


def build_engine(config: EngineConfig, run: RunConfig, model_folder: Path) -> LocalEngine:
    """An engine that is not started yet. Raises `ModelError` for a folder that cannot be used."""
    if config.backend == "simulated":
        from relax.data.tokenizer import Tokenizer
        from relax.engines.simulated import SimulatedEngine

        if run.simulation is None:
            raise EngineError("the engine 'simulated' needs run.simulation")
        tokenizer = Tokenizer.load(model_folder, trust_remote_code=run.model.trust_remote_code)
        return SimulatedEngine(run, run.simulation, tokenizer, str(model_folder))
    from relax.engines.embedded import load_engine

    return load_engine(
        model_folder,
        config,
        run.max_tokens,
        run.threads,
        skip_adoption=Fault.SKIP_ADOPTION in run.faults,
        trust_remote_code=run.model.trust_remote_code,
    )
