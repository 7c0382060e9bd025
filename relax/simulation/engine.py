"""An engine as a time model: continuous batching, a decode step per token of all running sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relax.config.simulation import EngineModelConfig
from relax.simulation.clock import Clock

LOGPROB = -1.0
"""Of every token that a simulated engine draws and a simulated trainer scores: their gap is 0."""
TOLERANCE = 1e-3
"""Of a token: what rounding of the clock may leave of a finished sequence."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sample being generated. `tokens_by_version`: drawn so far."""

    group_id: str
    k: int
    length: int
    prompt: int
    done: float = 0.0
    tokens_by_version: Counter[int] = field(default_factory=Counter)


class SimEngine:
    """Between two changes of its batch every running sequence gains tokens at one rate.

    `finished` is called with each sequence that has its length.
    """

    def __init__(self, clock: Clock, config: EngineModelConfig, finished: Callable[[Sample], None]) -> None:
        self.version = 0
        self.busy_s = 0.0
        self._clock, self._config, self._finished = clock, config, finished
        self._running: list[Sample] = []
        self._since = 0.0
        self._stalled_until = 0.0
        self._next: int | None = None

    @property
    def free(self) -> int:
        return self._config.slots - len(self._running)

    def start(self, sequences: Sequence[Sample], prompt_tokens: int) -> None:
        """Prefill the distinct prompts, then decode with the others."""
        self._advance()
        self._stall(prompt_tokens * self._config.prefill_token_s)
        self._running += sequences
        self._plan()

    def take(self, version: int) -> None:
        """New weights between two decode steps; running sequences go on."""
        self._advance()
        self.version = version
        self._stall(self._config.swap_s if self._running else 0.0)
        self._plan()

    def settle(self) -> None:
        """Bring tokens and busy time up to this moment."""
        self._advance()

    def cancel(self, sequences: Sequence[Sample]) -> None:
        """They end with what they have, and `finished` is not called."""
        self._advance()
        self._running = [sequence for sequence in self._running if sequence not in sequences]
        self._plan()

    @property
    def running(self) -> Sequence[Sample]:
        return tuple(self._running)

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._clock.now) + seconds

    def _step_s(self) -> float:
        cached = sum(s.prompt + s.done for s in self._running)
        config = self._config
        return config.step_s + config.sequence_s * len(self._running) + config.cached_token_s * cached

    def _advance(self) -> None:
        """Give every running sequence the tokens of the time since the last change."""
        begin = max(self._since, min(self._stalled_until, self._clock.now))
        elapsed = self._clock.now - begin
        if self._running:
            self.busy_s += self._clock.now - self._since
            if elapsed > 0:
                gained = elapsed / self._rate_s
                for sequence in self._running:
                    amount = min(gained, sequence.length - sequence.done)
                    sequence.done += amount
                    sequence.tokens_by_version[self.version] += amount  # type: ignore[assignment]
        self._since = self._clock.now

    def _plan(self) -> None:
        """When does the next sequence end, if nothing else happens?"""
        self._clock.cancel(self._next)
        self._next = None
        if not self._running:
            return
        self._rate_s = self._step_s()
        left = min(sequence.length - sequence.done for sequence in self._running)
        # The cache grows meanwhile: long spans are cut, so that the rate follows.
        span = min(left, 256.0)
        wait = max(0.0, self._stalled_until - self._clock.now) + span * self._rate_s
        self._next = self._clock.after(wait, self._tick)

    def _tick(self) -> None:
        self._next = None
        self._advance()
        ended = [sequence for sequence in self._running if sequence.length - sequence.done < TOLERANCE]
        if ended:
            self._running = [sequence for sequence in self._running if sequence.length - sequence.done >= TOLERANCE]
            for sequence in ended:
                self._finished(sequence)
        self._plan()
