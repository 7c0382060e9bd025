"""Wall time of a training step against TRL's GRPOTrainer: same model, prompts, batch, learning rate, machine.

    pip install -e '.[versus]' -c constraints.txt
    python -m benchmarks.versus_trl --json

A random Qwen3 of 10.7M parameters with a vocabulary of 64, 4 prompts x 16 samples a step: lengths are about
geometric with mean 60, up to 512. TRL runs in one process with the better of its settings (threads, accumulation);
ours with all services (no reference, as TRL with beta 0), asynchronous with staleness 1. Start-up and the first
steps are left out. `ratio` is the median over seeds of ours over TRL's.

`tiny_step_ms` and `tiny_trl_ms`: the character model of 100k parameters, 256 samples of at most 4 tokens a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.models import parameters, random_qwen3

ROOT = Path(__file__).parents[1]
TRL_SETTINGS = ({"threads": 1, "accumulate": 1}, {"threads": 2, "accumulate": 1}, {"threads": 2, "accumulate": 4})
ALPHABET = "0123456789>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of TRL per seed and setting")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only-tiny", action="store_true", help="leave the 10.7M model out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-versus-") as folder:
        figures = measure(Path(folder), options)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>20}: {value}")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if not options.only_tiny:
        figures |= large(folder, options)
    tiny_model = make_model(folder / "tiny_model", hidden_size=64, layers=2, heads=4, alphabet="0123456789>")
    task = {
        "model": str(tiny_model),
        "prompts": prompts(3, 512, 1),
        "groups": 16,
        "group_size": 16,
        "max_response_tokens": 4,
        "lr": 3e-3,
        "steps": 30,
        "seed": 1,
    }
    _, trl_s, _ = best_of_trl(task, folder)
    ours_s, parts = ours(
        task, folder / "tiny", steps=60, warm=20, instances=1, slots=256, lease=16, micro_batch_tokens=8192
    )
    return {
        **figures,
        "tiny_step_ms": round(1e3 * statistics.median(ours_s), 1),
        "tiny_trl_ms": round(1e3 * statistics.median(trl_s), 1),
        "tiny_parts": {name: round(value, 3) for name, value in parts.items()},
    }


def large(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = make_model(folder / "model", hidden_size=320, layers=8, heads=5, alphabet=ALPHABET)
    count = random_weights(model)
    ratios, ours_all, trl_all, tokens, chosen = [], [], [], [], None
    parts: dict[str, float] = {}
    for seed in range(1, options.seeds + 1):
        task = {
            "model": str(model),
            "prompts": prompts(3, 64, seed),
            "groups": 4,
            "group_size": 16,
            "max_response_tokens": 512,
            "lr": 1e-5,
            "steps": options.steps,
            "seed": seed,
        }
        settings, trl_s, trl_tokens = best_of_trl(task, folder, None if chosen is None else (chosen,))
        chosen = settings  # the better of the first seed is used for the others
        ours_s, parts = ours(
            task, folder / f"seed{seed}", steps=WARM_STEPS + 3 * options.steps, warm=WARM_STEPS, instances=1,
            slots=64, lease=2,
            micro_batch_tokens=4096,
        )  # fmt: skip
        ratios.append(statistics.fmean(ours_s) / statistics.fmean(trl_s))
        ours_all.append(statistics.fmean(ours_s))
        trl_all.append(statistics.fmean(trl_s))
        tokens.append((parts["response_tokens_mean"], trl_tokens))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "step_s": [round(value, 2) for value in ours_all],
        "trl_step_s": [round(value, 2) for value in trl_all],
        "mean_tokens": [round(a, 1) for a, _ in tokens],
        "trl_mean_tokens": [round(b, 1) for _, b in tokens],
        "trl_settings": chosen,
        "parts": {name: round(value, 3) for name, value in parts.items()},
        "parameters": count,
    }


def prompts(length: int, count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choice("0123456789") for _ in range(length)) + ">" for _ in range(count)]


def make_model(folder: Path, *, hidden_size: int, layers: int, heads: int, alphabet: str) -> Path:
    from relax.config.run import ModelConfig
    from relax.data.models import ensure_model

    config = ModelConfig(alphabet=alphabet, hidden_size=hidden_size, layers=layers, heads=heads)
    return ensure_model(config, folder, 1)


def random_weights(folder: Path) -> int:
    """In place of the character model's weights those that transformers gives by default: their answers have
    lengths as a fair die of 64 sides gives them. Returns the number of parameters."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = random_qwen3(64, hidden_size=320, intermediate_size=960, layers=8, **ids)
    model.save_pretrained(folder)
    return parameters(model)


def best_of_trl(
    task: dict[str, Any], folder: Path, settings: tuple[dict[str, int], ...] | None = None
) -> tuple[dict[str, int], list[float], float]:
    """The fastest of TRL's settings: (setting, step times, mean response length)."""
    results = []
    for setting in settings or TRL_SETTINGS:
        spec = {**task, **setting, "folder": str(folder / "trl")}
        environment = {**os.environ, "OMP_NUM_THREADS": str(setting["threads"]), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.trl_side", json.dumps(spec)],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=3000,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode != 0 or not lines:
            raise RuntimeError(
                f"TRL did not run ({done.returncode}); it needs pip install -e '.[versus]': {done.stderr[-2000:]}"
            )
        result = json.loads(lines[-1].removeprefix("RESULT "))
        results.append((statistics.fmean(result["step_s"]), setting, result))
    _, setting, result = min(results, key=lambda item: item[0])
    return setting, result["step_s"], result["mean_tokens"]


def ours(
    task: dict[str, Any],
    folder: Path,
    *,
    steps: int,
    warm: int,
    instances: int,
    slots: int,
    lease: int,
    micro_batch_tokens: int,
) -> tuple[list[float], dict[str, float]]:
    """Wall times of the steps after the warm ones, and means of where they went, with all services."""
    folder.mkdir(parents=True)
    data = folder / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": text, "label": text.rstrip(">")}) for text in task["prompts"]))
    document = yaml.safe_load((ROOT / "deploy" / "tiny_cpu.yaml").read_text())
    run = {
        "name": "versus",
        "run_dir": str(folder / "run"),
        "seed": task["seed"],
        "steps": steps,
        "groups_per_step": task["groups"],
        "group_size": task["group_size"],
        "max_staleness": 1,
        "max_prompt_tokens": 4,
        "max_response_tokens": task["max_response_tokens"],
        "model": {"kind": "hf", "path": task["model"]},
    }
    sections: dict[str, dict[str, Any]] = {
        "controller": {},
        "dcs": {},
        "rollout": {
            "instances": instances,
            "data": {"kind": "jsonl", "path": str(data)},
            "engine": {"slots": slots},
        },
        "reward": {"parts": [{"name": "overlap"}]},
        "actor": {
            "algorithm": {"name": "dapo", "clip_high": 0.2},
            "groups_per_lease": lease,
            "micro_batch_tokens": micro_batch_tokens,
            "optim": {"lr": task["lr"]},
        },
    }
    document["applications"] = [app for app in document["applications"] if app["name"] in sections]
    for app in document["applications"]:
        app["args"] = {"run": copy.deepcopy(run), app["name"]: sections[app["name"]]}
    path = folder / "versus.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "relax.cli.main", "run", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=3000, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    timed = lines[warm:]
    parts = ("response_tokens_mean", "train_compute_s", "engine_busy_s", "wait_data_s", "publish_s")
    return [line["step_s"] for line in timed], {name: statistics.fmean(line[name] for line in timed) for name in parts}


if __name__ == "__main__":
    main()
