from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.config.run import ModelConfig
from relax.data import models
from relax.data.models import await_model, building, ensure_model, validate_model_folder
from relax.data.tokenizer import Tokenizer
from relax.types import ModelError

SMALL = ModelConfig(hidden_size=16, layers=1, heads=2)


def contents(folder: Path) -> dict[str, str]:
    return {p.name: blake2b(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_the_default_tiny_model_has_about_a_hundred_thousand_parameters(tmp_path: Path) -> None:
    path = ensure_model(ModelConfig(), tmp_path / "model", 1)
    model = AutoModelForCausalLM.from_pretrained(str(path))
    assert sum(p.numel() for p in model.parameters()) == 99_584
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.max_position_embeddings == 512
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (14, 0, (2,))
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (4, 2), (3, 3)])
def test_any_number_of_heads_gives_a_model_that_runs(tmp_path: Path, heads: int, kv_heads: int) -> None:
    path = ensure_model(ModelConfig(hidden_size=24, layers=1, heads=heads), tmp_path / "model", 1)
    model = AutoModelForCausalLM.from_pretrained(str(path))
    assert model.config.num_key_value_heads == kv_heads
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


def test_the_tiny_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    first = contents(ensure_model(SMALL, tmp_path / "a", 1))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
    torch.manual_seed(3)
    assert contents(ensure_model(SMALL, tmp_path / "b", 1)) == first
    assert contents(ensure_model(SMALL, tmp_path / "c", 2))["model.safetensors"] != first["model.safetensors"]


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    path = ensure_model(SMALL, tmp_path / "model", 1)
    before = (path / "model.safetensors").stat().st_ino
    assert ensure_model(SMALL, path, 1) == path
    assert (path / "model.safetensors").stat().st_ino == before


def test_a_model_made_from_other_settings_is_refused(tmp_path: Path) -> None:
    path = ensure_model(SMALL, tmp_path / "model", 1)
    with pytest.raises(ModelError, match=r"made from other settings \(seed 1 -> 2\)"):
        ensure_model(SMALL, path, 2)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"holds files but no relax_model.json"):
        ensure_model(SMALL, tmp_path / "model", 1)
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_an_alphabet_with_a_repeated_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.alphabet must hold different characters"):
        ensure_model(SMALL.model_copy(update={"alphabet": "aa"}), tmp_path / "model", 1)


def _make(folder: str, barrier: multiprocessing.synchronize.Barrier, answers: multiprocessing.Queue[object]) -> None:
    torch.set_num_threads(1)
    barrier.wait(timeout=120)
    try:
        answers.put(contents(ensure_model(SMALL, Path(folder), 1)))
    except BaseException as error:
        answers.put(repr(error))
        raise


def test_three_processes_at_once_get_one_and_the_same_model(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_make, args=(str(tmp_path / "model"), barrier, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert got == [contents(tmp_path / "model")] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.lock"], "no temporary folder is left"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), building(tmp_path / "model") as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_comes_second_leaves_the_first_in_place(tmp_path: Path) -> None:
    with building(tmp_path / "model") as temporary:
        (temporary / "who").write_text("second")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "who").write_text("first")
    assert (tmp_path / "model" / "who").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_hugging_face_folder_is_checked_and_used_where_it_is(plain_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(kind="hf", path=str(plain_folder))
    assert ensure_model(config, tmp_path / "model", 1) == plain_folder
    assert not (tmp_path / "model").exists()


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _point_to_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001.safetensors"}}')


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "model folder .*m does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "strange config": (lambda f: (f / "config.json").write_text("[]"), "config.json names no model_type"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "pickle": (_pickle_only, "has pickled weights only"),
    "cut weights": (_cut, "model.safetensors is broken or cut off"),
    "text as weights": (lambda f: (f / "model.safetensors").write_text("git lfs"), "is broken or cut off"),
    "missing shard": (_point_to_missing_shard, "model-00001.safetensors is missing"),
    "empty index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_model_folder_is_refused_with_the_file_and_the_fault(
    plain_folder: Path, tmp_path: Path, fault: str
) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    damage, message = FAULTS[fault]
    damage(tmp_path / "m")
    with pytest.raises(ModelError, match=message):
        validate_model_folder(tmp_path / "m")
    with pytest.raises(ModelError, match=message):
        ensure_model(ModelConfig(kind="hf", path=str(tmp_path / "m")), tmp_path / "unused", 1)


def test_a_folder_of_shards_is_accepted(plain_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model-00001.safetensors")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00001.safetensors"}})
    )
    validate_model_folder(tmp_path / "m")


def test_only_one_of_several_callers_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Path] = []
    real = models._build_tiny

    def counted(spec: dict[str, Any], folder: Path) -> None:
        builds.append(folder)
        real(spec, folder)

    monkeypatch.setattr(models, "_build_tiny", counted)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: ensure_model(SMALL, tmp_path / "model", 1), range(3)))
    assert paths == [tmp_path / "model"] * 3 and len(builds) == 1


def test_a_process_that_does_not_build_waits_for_the_one_that_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no process has made the model folder .* within 0.3 s"):
        await_model(SMALL, tmp_path / "model", 1, 0.3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_model, SMALL, tmp_path / "model", 1, 120.0)
        ensure_model(SMALL, tmp_path / "model", 1)
        assert waiting.result(60) == tmp_path / "model"
