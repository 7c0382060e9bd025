"""TRL's GRPOTrainer on one task: started by `benchmarks.versus_trl` in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any


def main() -> None:
    spec = json.loads(sys.argv[1])
    print("RESULT " + json.dumps(run(spec)), flush=True)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """spec: model, prompts (text), groups, group_size, max_response_tokens, lr, steps, seed, threads, accumulate,
    folder. Returns the wall time of each step after the first."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(spec["threads"])
    samples = spec["groups"] * spec["group_size"]
    times: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter() - self.began)

    def reward(completions: list[str], completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        lengths.append(statistics.fmean(len(ids) for ids in completion_ids))
        wanted = [prompt.rstrip(">") for prompt in prompts]
        return [
            sum(a == b for a, b in zip(text, want, strict=False)) / max(len(text), len(want), 1)
            for text, want in zip(completions, wanted, strict=True)
        ]

    settings = GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=samples // spec["accumulate"],
        gradient_accumulation_steps=spec["accumulate"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_response_tokens"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        max_steps=spec["steps"] + 1,
        seed=spec["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": text} for text in spec["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"step_s": times[1:], "mean_tokens": statistics.fmean(lengths)}


if __name__ == "__main__":
    main()
