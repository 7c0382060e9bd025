"""Model folders: checking any, and making the small random one of `model.kind: tiny_char`."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import tokenizers
from safetensors import SafetensorError, safe_open
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from relax.config.run import ModelConfig
from relax.types import Json, ModelError

if TYPE_CHECKING:
    import torch

SPEC_FILE = "relax_model.json"
"""Written into a folder that we made: the settings it was made from."""

MAX_POSITIONS = 512
"""max_position_embeddings of `tiny_char`."""

ROPE_THETA = 100.0
"""Base of the rotary positions of `tiny_char`: its texts have a few dozen characters, so wavelengths of that order
tell them apart. With the usual 10^4 and more it cannot learn to reverse."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Ids 0, 1 and 2 of `tiny_char`; the alphabet follows in its order."""

BUILD_DEADLINE_S = 120.0
"""Longest wait for another process that makes the same model: on loaded cores the library's classes load slowly."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def ensure_model(config: ModelConfig, folder: Path, seed: int) -> Path:
    """The folder of the configured policy, ready to load.

    `hf`: `config.path`, checked; `folder` is not touched. `tiny_char`: `folder`, made on the first
    call. Any number of processes may call at once: one builds and the others wait for it. Where a
    lock does not hold (some network file systems) several build beside the target and one rename
    wins; the content is a function of (config, seed). Raises `ModelError` for a folder that cannot
    be used, or that was made from other settings.
    """
    if config.path is not None:
        path = Path(config.path)
        validate_model_folder(path)
        return path
    spec = _tiny_spec(config, seed)
    if not _holds_files(folder):
        with _alone(folder):
            if not _holds_files(folder):
                with building(folder) as temporary:
                    _build_tiny(spec, temporary)
    _check_spec(folder, spec)
    validate_model_folder(folder)
    return folder


def await_model(config: ModelConfig, folder: Path, seed: int, deadline_s: float) -> Path:
    """As `ensure_model`, where another process builds: one that loads the model's classes anyway."""
    end = time.monotonic() + deadline_s
    while config.path is None and not _holds_files(folder):
        if time.monotonic() > end:
            raise ModelError(f"no process has made the model folder {folder} within {deadline_s:g} s")
        time.sleep(0.1)
    return ensure_model(config, folder, seed)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock", timeout=BUILD_DEADLINE_S):
            yield
    except filelock.Timeout as error:
        raise ModelError(f"another process has been making {folder} for {BUILD_DEADLINE_S:g} s") from error
    except OSError as error:
        raise ModelError(f"cannot make the model folder {folder}: {error.strerror or error}") from error


def validate_model_folder(path: Path) -> None:
    """Raise `ModelError` unless `path` is a complete Hugging Face folder: configuration, whole
    safetensors weights and a tokenizer. Reads headers only, so it is quick for any size."""
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist")
    config = _read_json(path / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path / 'config.json'} names no model_type: it is not a Hugging Face model configuration")
    for file in _weight_files(path):
        _check_weight_file(file)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"model folder {path} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})")


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that becomes `folder` by one rename when the block ends well.

    If somebody else's folder is there by then, ours is thrown away. Raises `ModelError` when the
    place cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.building-", dir=folder.parent))
    except OSError as error:
        raise ModelError(f"cannot make the model folder {folder}: {error.strerror or error}") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if not _holds_files(folder):
                raise ModelError(f"cannot move the new model to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _tiny_spec(config: ModelConfig, seed: int) -> dict[str, Json]:
    if len(set(config.alphabet)) != len(config.alphabet) or not config.alphabet:
        raise ModelError(f"model.alphabet must hold different characters, at least one, not {config.alphabet!r}")
    return {
        "kind": config.kind,
        "alphabet": config.alphabet,
        "hidden_size": config.hidden_size,
        "layers": config.layers,
        "heads": config.heads,
        "seed": seed,
    }


def _check_spec(folder: Path, spec: dict[str, Json]) -> None:
    if not (folder / SPEC_FILE).is_file():
        raise ModelError(f"{folder} holds files but no {SPEC_FILE}: it was not made here; choose another run folder")
    found = _read_json(folder / SPEC_FILE)
    if found != spec:
        other = found if isinstance(found, dict) else {}
        changed = ", ".join(f"{k} {other.get(k)!r} -> {v!r}" for k, v in spec.items() if other.get(k) != v)
        raise ModelError(
            f"{folder} was made from other settings ({changed or 'unknown ones'}): "
            "use another run folder, or remove this one to start over"
        )


def _build_tiny(spec: dict[str, Json], folder: Path) -> None:
    """About 100k parameters (99,584 at hidden size 64, 2 layers, 4 heads and 11 characters)."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *spec["alphabet"]))}
    heads, hidden = spec["heads"], spec["hidden_size"]
    pad, bos, eos = range(len(SPECIAL_TOKENS))
    # Here, and not above: a process that only checks a folder need not load transformers' models.
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=spec["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=hidden // heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=hidden**-0.5,
        **_rope(Qwen3Config),
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config).float()
    _fill(model, spec["seed"], hidden**-0.5)
    model.save_pretrained(folder)
    _write_char_tokenizer(vocabulary, folder)
    (folder / SPEC_FILE).write_text(json.dumps(spec, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _rope(config_class: type) -> dict[str, Any]:
    """The keyword of the rotary base in this transformers: 5.x has `rope_parameters`, 4.x `rope_theta`."""
    if "rope_parameters" in inspect.signature(config_class).parameters:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
    return {"rope_theta": ROPE_THETA}


def _fill(model: torch.nn.Module, seed: int, std: float) -> None:
    """Own initialisation: the library's differs between its versions, the content may not. Norm weights are 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, std, generator=generator)


def _write_char_tokenizer(vocabulary: dict[str, int], folder: Path) -> None:
    """One token per character. No unknown token: a character outside the alphabet is an error, not a guess."""
    pad, bos, eos = SPECIAL_TOKENS
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: transformers 5 would name a class here that transformers 4 does not have.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        return [path / str(name) for name in sorted(set(weight_map.values()))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if any(path.glob("pytorch_model*.bin")):
        raise ModelError(f"model folder {path} has pickled weights only: convert them to model.safetensors")
    raise ModelError(f"model folder {path} has no weights (model.safetensors, or shards with an index)")


def _check_weight_file(file: Path) -> None:
    if not file.is_file():
        raise ModelError(f"weight file {file} is missing")
    try:
        with safe_open(str(file), framework="numpy") as tensors:
            names = list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"weight file {file} is broken or cut off: {error}") from error
    if not names:
        raise ModelError(f"weight file {file} holds no tensor")


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"model folder {path.parent} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def count_parameters(path: Path) -> int:
    """Parameters of a validated model folder, from its weight files; tied tensors count once."""
    total = 0
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total
