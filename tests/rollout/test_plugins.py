from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from relax.plugins import PluginError, load_class, load_function, load_object
from relax.rollout.load import load_worker
from relax.rollout.single_turn import SingleTurnWorker


def write(folder: Path, code: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(code)
    return path


def test_an_object_is_found_by_module_and_by_file(tmp_path: Path) -> None:
    write(tmp_path, "def answer(): return 42\n")
    (tmp_path / "sub").mkdir()
    assert load_object("collections:OrderedDict", None) is collections.OrderedDict
    assert load_function("mine.py:answer", tmp_path)() == 42
    assert load_function("../mine.py:answer", tmp_path / "sub")() == 42
    assert load_function(f"{tmp_path}/mine.py:answer", Path("/elsewhere"))() == 42


def test_a_file_is_loaded_once_and_two_of_one_name_stay_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"class Worker: where = '{name}'\n", "worker.py")
    first = load_class("a/worker.py:Worker", tmp_path)
    assert load_class("a/worker.py:Worker", tmp_path) is first
    assert (first.where, load_class("b/worker.py:Worker", tmp_path).where) == ("a", "b")  # type: ignore[attr-defined]


def test_a_file_may_define_dataclasses(tmp_path: Path) -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    write(tmp_path, code)
    assert load_class("mine.py:A", tmp_path)(x=3).x == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "'nothing' must look like package.module:name or path/to/file.py:name"),
        (":x", "must look like"),
        ("json:", "must look like"),
        ("json:a-b", "must look like"),
        ("no_such_module_here:x", "cannot import 'no_such_module_here'.*ModuleNotFoundError"),
        ("json:dump_s", r"json/__init__.py has no 'dump_s' \(asked for by 'json:dump_s'\): did you mean 'dumps'"),
        ("gone.py:x", "file .*/gone.py does not exist"),
    ],
)
def test_a_spec_that_leads_nowhere_is_explained(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_object(spec, tmp_path)


@pytest.mark.parametrize(
    ("code", "message"),
    [("def f(:\n", "mine.py fails to load .*SyntaxError"), ("1/0\n", "mine.py fails to load .*ZeroDivisionError")],
)
def test_a_file_that_fails_to_load_is_explained_and_can_be_corrected(tmp_path: Path, code: str, message: str) -> None:
    path = write(tmp_path, code)
    with pytest.raises(PluginError, match=message):
        load_object("mine.py:f", tmp_path)
    path.write_text("def f(): return 'now it works'\n")
    assert load_function("mine.py:f", tmp_path)() == "now it works"


def test_class_and_function_are_not_mixed_up() -> None:
    assert load_function("json:dumps", None) is json.dumps
    with pytest.raises(PluginError, match="'json:dumps' is a function, a class is needed"):
        load_class("json:dumps", None)
    with pytest.raises(PluginError, match="'json:JSONDecoder' is a class, a function is needed"):
        load_function("json:JSONDecoder", None)
    with pytest.raises(PluginError, match="'json:__version__' is a str, a function is needed"):
        load_function("json:__version__", None)


def test_the_built_in_worker_has_a_name() -> None:
    assert load_worker("single_turn", None) is SingleTurnWorker
    assert load_worker("relax.rollout.single_turn:SingleTurnWorker", None) is SingleTurnWorker


def test_an_own_worker_is_loaded_from_a_recipe_file(tmp_path: Path) -> None:
    write(tmp_path, "class W:\n    def __init__(self, context): pass\n    async def step(self, item): return item\n")
    assert load_worker("mine.py:W", tmp_path).__name__ == "W"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class W:\n    pass\n", "has no `step`: it needs `async def step"),
        ("class W:\n    def step(self, item): pass\n", "has a `step` that is not `async def step"),
        ("class W:\n    step = 3\n", "has a `step` that is not `async def step"),
        (
            "class W:\n    def __init__(self, c): pass\n    async def step(self): pass\n",
            r"has `step\(self\)`: it must take exactly one item",
        ),
        (
            "class W:\n    def __init__(self, c): pass\n    async def step(self, a, b): pass\n",
            r"has `step\(self, a, b\)`: it must take exactly one item",
        ),
        (
            "class W:\n    async def step(self, item): pass\n",
            r"is built as W\(\): it must take exactly one WorkerContext",
        ),
        (
            "class W:\n    def __init__(self, a, b): pass\n    async def step(self, item): pass\n",
            r"is built as W\(a, b\): it must take exactly one WorkerContext",
        ),
    ],
)
def test_a_class_that_is_no_worker_is_refused_with_class_file_and_fault(
    tmp_path: Path, code: str, message: str
) -> None:
    write(tmp_path, code)
    with pytest.raises(PluginError, match=f"worker class W in {tmp_path}/mine.py {message}"):
        load_worker("mine.py:W", tmp_path)


def test_an_unknown_worker_name_lists_the_built_in_ones() -> None:
    with pytest.raises(PluginError, match="unknown worker 'multi_turn': built in are single_turn; an own one"):
        load_worker("multi_turn", None)
