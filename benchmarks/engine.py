"""The embedded engine against `generate` of transformers in static batches, in tokens per CPU-second.

    python -m benchmarks.engine --json

Both sample at temperature 1 from one random Qwen3 of 10.8M parameters, batch 16, in one process, taking turns. The
engine gets all requests at once and fills a slot as it becomes free; `generate` runs them sixteen at a time, each
batch to its longest. CPU time is that of the whole process; the baseline counts with the better of 1 and 2 threads.

`ratio_equal`: every response has the same length; `ratio_ragged`: lengths are geometric with mean 64, at most 512.
Tokens are those that were asked for, so what a static batch computes for rows that have ended counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.models import parameters, random_qwen3
from relax.engines.embedded import EmbeddedEngine
from relax.engines.requests import FutureSink, Request
from relax.types import SamplingParams

BATCH = 16
PROMPT_TOKENS = 16
VOCAB = 512


class Letters:
    """A stand-in for a tokenizer: the engine decodes only for stop strings."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    figures = measure(options.requests, options.reps)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>28}: {value}")


def measure(requests: int, reps: int) -> dict[str, Any]:
    model = random_qwen3(VOCAB)
    draw = np.random.default_rng(0)
    prompts = draw.integers(3, VOCAB, (requests, PROMPT_TOKENS)).astype(np.int32)
    lengths = {
        "equal": np.full(requests, 64),
        "ragged": np.minimum(draw.geometric(1 / 64, requests), 512),
    }
    figures: dict[str, Any] = {}
    engine = EmbeddedEngine(model, Letters(), eos_ids=[0], slots=BATCH, max_context=640, threads=1)
    engine.start()
    try:
        for kind, wanted in lengths.items():
            ways: dict[str, Callable[[], None]] = {
                "engine": lambda wanted=wanted: ours(engine, prompts, wanted),  # type: ignore[misc]
                "generate_1": lambda wanted=wanted: static(model, prompts, wanted, 1),  # type: ignore[misc]
                "generate_2": lambda wanted=wanted: static(model, prompts, wanted, 2),  # type: ignore[misc]
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for rep in range(reps + 1):
                for name, way in ways.items():
                    begin = time.process_time()
                    way()
                    if rep:  # the first warms up
                        rates[name].append(int(wanted.sum()) / (time.process_time() - begin))
            medians = {name: statistics.median(values) for name, values in rates.items()}
            baseline = max(medians["generate_1"], medians["generate_2"])
            figures[f"ratio_{kind}"] = round(medians["engine"] / baseline, 3)
            figures |= {f"{name}_{kind}_tokens_per_cpu_s": round(value, 1) for name, value in medians.items()}
    finally:
        engine.close(30.0)
    return {**figures, "parameters": parameters(model), "batch": BATCH, "requests": requests, "reps": reps}


def ours(engine: EmbeddedEngine, prompts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
    sink = FutureSink()
    made = [
        Request(
            f"r{index}", prompt, SamplingParams(max_new_tokens=int(length), ignore_eos=True, seed=index), index, sink
        )
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    futures = [sink.expect(request) for request in made]
    engine.submit(made)
    for future, length in zip(futures, lengths, strict=True):
        assert len(future.result(600).output_ids) == length


def static(model: Any, prompts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        for start in range(0, len(prompts), BATCH):
            ids = torch.from_numpy(prompts[start : start + BATCH].astype(np.int64))
            longest = int(lengths[start : start + BATCH].max())
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                eos_token_id=0,
            )
            assert out.shape[1] == ids.shape[1] + longest
    finally:
        torch.set_num_threads(1)


if __name__ == "__main__":
    main()
