"""Responses that the data holds: for supervised fine-tuning and preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax.config.run import RunConfig
from relax.data.tokenizer import Tokenizer
from relax.types import NO_VERSION, DataError, FinishReason, PolicyVersion, Prompt, SamplingParams, Trajectory

RESPONSES = "responses"
"""Key in a prompt's metadata: its responses, one per member of the group (for pairs: chosen, rejected)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a prompt must bring: `count` responses of at most `max_tokens` tokens each, end token included."""

    count: int
    max_tokens: int

    def texts(self, prompt: Prompt) -> list[str]:
        """The responses; of a prompt without any its label, where one is wanted. Raises `DataError`."""
        found = prompt.metadata.get(RESPONSES)
        if found is None and self.count == 1 and isinstance(prompt.label, str):
            found = [prompt.label]
        if not isinstance(found, list) or len(found) != self.count or not all(isinstance(r, str) and r for r in found):
            wanted = "`response` (or a text as `label`)" if self.count == 1 else "`chosen` and `rejected`"
            raise DataError(f"training on recorded responses needs {wanted}, not empty")
        return found

    def tokens(self, prompt: Prompt, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each response, with the end token. Raises `DataError`."""
        return [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in self.texts(prompt)]


def recorded_of(run: RunConfig) -> Recorded | None:
    """What the data of this run must bring; None where engines generate."""
    return None if run.generates else Recorded(run.group_size, run.max_response_tokens)


def recorded_trajectory(prompt_tokens: list[int], response: list[int], version: PolicyVersion) -> Trajectory:
    """A response as if `version` had drawn it with certainty: training on it reads no rollout log-prob."""
    tokens = np.array([*prompt_tokens, *response], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt_tokens)
    return Trajectory(
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        sampling=SamplingParams(),
        finish_reason=FinishReason.STOP,
    )
