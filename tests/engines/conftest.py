"""Tiny random models and a tokenizer of letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from relax.engines.embedded import EmbeddedEngine
from relax.engines.requests import FutureSink, Output, Request
from relax.types import PolicyVersion, SamplingParams
from relax.weights.digest import tensors_digest

torch.set_num_threads(1)
T = TypeVar("T")
VOCAB = 32
EOS = 31


class LetterTokenizer:
    """Token i is the i-th printable character from 'A'; the end token has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(65 + i) for i in ids if i != EOS)


def make_model(kind: str = "qwen3", seed: int = 0, vocab: int = VOCAB) -> PreTrainedModel:
    sizes = dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(head_dim=16, tie_word_embeddings=False, **sizes)).eval()
    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=True, **sizes)).eval()


def published(model: PreTrainedModel) -> tuple[list[tuple[str, Tensor]], str]:
    """The trainer's view: (name, tensor) with tied parameters once, and their digest."""
    pairs = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    return pairs, tensors_digest(pairs)


class Driver:
    """Runs requests on an engine from a test's thread."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.sink = FutureSink()

    def request(self, ids: Sequence[int], sampling: SamplingParams, name: str = "r") -> Request:
        array = np.array(ids, dtype=np.int32)
        self.engine.check(array, sampling)
        return Request(name, array, sampling, sampling.seed or 0, self.sink)

    def start(self, requests: Sequence[Request]) -> Callable[[], list[Output]]:
        futures = [self.sink.expect(request) for request in requests]
        self.engine.submit(requests)
        return lambda: [future.result(30) for future in futures]

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Output]:
        pairs = zip(prompts, sampling, strict=True)
        return self.start([self.request(ids, s, f"r{i}") for i, (ids, s) in enumerate(pairs)])()

    def adopt(self, model: PreTrainedModel, version: int) -> str:
        pairs, digest = published(model)
        return self.engine.update_weights(pairs, PolicyVersion(version), digest, 30).digest


@contextmanager
def running_engine(model: PreTrainedModel, **options: object) -> Iterator[Driver]:
    settings: dict[str, object] = {"eos_ids": [EOS], "slots": 8, "max_context": 256, "threads": 1} | options
    engine = EmbeddedEngine(model, LetterTokenizer(), **settings)  # type: ignore[arg-type]
    engine.start()
    with ExitStack() as stack:
        stack.callback(engine.close, 30)
        yield Driver(engine)


class Gate:
    """Counts out forwards of an engine's model: each takes a permit, so a test decides how far generation gets."""

    def __init__(self, model: PreTrainedModel, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._moved = threading.Condition()
        self._permits = 0
        self._entered = 0
        model.register_forward_pre_hook(self._enter)

    def _enter(self, *_: object) -> None:
        with self._moved:
            self._entered += 1
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: self._permits > 0, timeout=30), "no permit for this forward"
            self._permits -= 1

    def allow(self, forwards: int) -> None:
        with self._moved:
            self._permits += forwards
            self._moved.notify_all()

    def advance(self, forwards: int) -> None:
        """Let exactly so many happen; returns when the decode thread stands before the next one."""
        with self._moved:
            goal = self._entered + forwards + (1 if self._entered == 0 else 0)
            self._permits += forwards
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: self._entered >= goal, timeout=30)

    def let_commands_pass(self) -> None:
        """One more forward if the decode thread owes somebody an answer at its next step."""
        if self._engine._inbox:
            self.allow(1)

    def step_until_done(self, work: Callable[[], T]) -> T:
        """Run `work`, which needs a step boundary, beside the decode thread."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            while not future.done():
                self.let_commands_pass()
                wait([future], timeout=0.01)
            return future.result()


@dataclass(frozen=True)
class Kit:
    """What the tests build with."""

    model: Callable[..., PreTrainedModel] = make_model
    published: Callable[[PreTrainedModel], tuple[list[tuple[str, Tensor]], str]] = published
    engine: Callable[..., AbstractContextManager[Driver]] = running_engine
    gate: type[Gate] = Gate
    tokenizer: type[LetterTokenizer] = LetterTokenizer
    eos: int = EOS
    vocab: int = VOCAB


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A Qwen3 engine that holds version 0."""
    model = make_model()
    with running_engine(make_model()) as started:
        started.adopt(model, 0)
        yield started


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ragged, 1 to 20 tokens, some equal."""
    rng = np.random.default_rng(7)
    distinct = [rng.integers(0, EOS, n).tolist() for n in (3, 1, 20, 7, 7, 12)]
    return [*distinct, distinct[0], distinct[2]]
