"""Every code block of the documentation is run, or parsed as far as that goes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, BadBlock, Block, blocks_of, check_inline, documents, parse, wrong_command

FAST_DEADLINE_S = 120.0
SLOW_DEADLINE_S = 900.0

DOCUMENTS = documents()


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder as a user has it, without what the blocks are to make."""
    for name in ("deploy", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def execute(block: Block, folder: Path, deadline_s: float) -> None:
    """Raises `BadBlock` with the output unless it ends well in time."""
    scripts = Path(sys.executable).parent
    stamp = folder / ".installed"  # newer than what make compares it with: the environment is there, nothing is built
    stamp.touch()
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MAKEFLAGS": f" -- STAMP={stamp} VENV={scripts.parent}",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-eu", "-o", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    try:
        found = subprocess.run(
            [*command, block.text], cwd=folder, env=environment, capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired as error:
        raise block.fault(f"did not end within {deadline_s:g} s") from error
    if found.returncode != 0:
        raise block.fault(f"ended with {found.returncode}:\n{found.stdout[-4000:]}\n{found.stderr[-4000:]}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_every_block_has_a_language_and_parses(path: Path) -> None:
    """behaviour: B43"""
    for block in blocks_of(path):
        parse(block)
    check_inline(path)


def running(slow: bool) -> list[Path]:
    def has(path: Path) -> bool:
        try:
            return any(block.runs and ("slow" in block.tags) == slow for block in blocks_of(path))
        except BadBlock:
            return False  # the test above fails on it; here it would end the collection of all tests

    return [path for path in DOCUMENTS if has(path)]


@pytest.mark.parametrize("path", running(slow=False), ids=ids)
def test_blocks_that_are_tagged_cpu_run(path: Path, workplace: Path) -> None:
    """behaviour: B43"""
    for block in blocks_of(path):
        if block.runs and "slow" not in block.tags:
            execute(block, workplace, FAST_DEADLINE_S)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", running(slow=True), ids=ids)
def test_a_document_runs_from_top_to_bottom(path: Path, workplace: Path) -> None:
    """behaviour: B43"""
    for block in blocks_of(path):
        if block.runs:
            execute(block, workplace, SLOW_DEADLINE_S if "slow" in block.tags else FAST_DEADLINE_S)


# ---------------------------------------------------------------------- the checks themselves


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "page.md"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("```\nx\n```", "tag the block"),
        ("```ruby\nx\n```", "language 'ruby'"),
        ("```bash gpu\nls\n```", "unknown tag 'gpu'"),
        ("```bash slow\nls\n```", "'slow' goes with 'cpu'"),
        ("```json cpu\n{}\n```", "cannot run"),
        ("```bash\nls", "never closed"),
        ("```bash\nif then\n```", "syntax error"),
        ("```bash\nA=1 relax check FILE && relax rum FILE\n```", "no command 'rum'"),
        ("```bash\nrelax run FILE \\\n  --sett a.b=1\n```", "--sett"),
        ("```bash\nrelax replay\n```", "target"),
        ("```bash\nrelax diff A B --tolerance much\n```", "much"),
        ("```bash\nrelax recipe old x\n```", "no command 'old'"),
        ("```bash\nmake demoo\n```", "no target 'demoo'"),
        ("```python\ndef f(:\n```", "line 1 of the block"),
        ("```json\n{a: 1}\n```", "property name"),
        ("```yaml\nrun: {stepz: 3}\n```", "did you mean 'steps'"),
        ("```yaml\nroles: {}\n```", "not sections of one"),
        ("```yaml over=deploy/tiny_dpo_cpu.yaml\nreward: {parts: [{name: exact}]}\n```", "no application 'reward'"),
        ("```yaml\napplications: []\n```", "must be a list with the roles"),
    ],
)
def test_a_wrong_block_is_named_with_file_and_line(block: str, words: str, written: Path) -> None:
    """behaviour: B43"""
    written.write_text(f"# Page\n\n{block}\n")
    with pytest.raises(BadBlock, match=f"page.md:3: (.|\n)*{words}"):
        for found in blocks_of(written):
            parse(found)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("```bash cpu\nls deploy\ncat missing.txt | sort\n```", "ended with 1"),
        ("```python cpu\nassert 1 == 2\n```", "AssertionError"),
    ],
)
def test_a_block_that_fails_when_it_runs_is_named(block: str, words: str, written: Path, workplace: Path) -> None:
    """behaviour: B43"""
    written.write_text(f"{block}\n")
    (found,) = blocks_of(written)
    with pytest.raises(BadBlock, match=f"page.md:1: (.|\n)*{words}"):
        execute(found, workplace, FAST_DEADLINE_S)


def test_a_whole_run_file_in_a_page_goes_through_the_check(written: Path) -> None:
    """behaviour: B43. Data and model are looked at, which the models of the configuration do not do."""
    data = "{kind: toy, task: reverse, params: {length: 3}}"
    text = (ROOT / "deploy" / "tiny_cpu.yaml").read_text().replace(data, "{kind: jsonl, path: no.jsonl}")
    written.write_text(f"```yaml\n{text}```\n")
    with pytest.raises(BadBlock, match=r"no\.jsonl"):
        parse(*blocks_of(written))


@pytest.mark.parametrize(
    ("text", "words"),
    [("use `relax stopp RUN`", "no command 'stopp'"), ("`relax export RUN --too DIR`", "no option '--too'")],
)
def test_a_wrong_command_in_the_text_is_named(text: str, words: str, written: Path) -> None:
    """behaviour: B43"""
    written.write_text(f"```text\nrelax anything\n```\n{text}\n")
    with pytest.raises(BadBlock, match=f"page.md:4: .*{words}"):
        check_inline(written)


def test_help_is_a_command_line_too() -> None:
    assert wrong_command(["run", "--help"]) is None
