import contextlib
import dataclasses
import json
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.telemetry.run_folder import RunFolder, RunFolderError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "one")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process cannot grow over 4 KiB; a write beyond is cut short, then fails, as on a full disk.

    Not a fixture: pytest reports while fixtures are up, and its own output may be a file over that size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclasses.dataclass
class Sample:
    response: str
    reward: float | None


def test_what_was_written_is_read_back(folder: RunFolder) -> None:
    folder.write_config({"run": {"steps": 2}})
    folder.append_metrics({"step": 1, "loss": 0.5})
    folder.append_metrics({"step": 2, "loss": 0.25})
    folder.append_samples([Sample("12", 1.0), {"response": "a\nb", "reward": None}])
    folder.write_summary({"steps": 2})
    again = RunFolder(folder.path)
    assert again.read_config() == {"run": {"steps": 2}}
    assert again.read_metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert again.read_samples() == [{"response": "12", "reward": 1.0}, {"response": "a\nb", "reward": None}]
    assert again.read_summary() == {"steps": 2}


def test_a_new_folder_has_no_steps_and_no_summary(folder: RunFolder) -> None:
    assert folder.read_metrics() == []
    with pytest.raises(RunFolderError, match=r"summary\.json: No such file"):
        folder.read_summary()


def test_only_the_ends_of_a_long_sample_file_are_read(folder: RunFolder) -> None:
    folder.append_samples({"k": k} for k in range(10))
    assert [sample["k"] for sample in folder.read_samples(2, 3)] == [0, 1, 7, 8, 9]
    assert [sample["k"] for sample in folder.read_samples(8, 5)] == list(range(10))


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', "x" * 100_000])
def test_a_line_torn_by_a_crash_is_left_out_and_then_removed(folder: RunFolder, torn: str) -> None:
    """behaviour: B13"""
    folder.append_metrics({"step": 0})
    folder.append_metrics({"step": 1})
    with open(folder.metrics_path, "a") as file:
        file.write(torn)
    restarted = RunFolder(folder.path)
    assert restarted.read_metrics() == [{"step": 0}, {"step": 1}]
    restarted.append_metrics({"step": 2})
    assert restarted.read_metrics() == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        folder.read_metrics()


def test_a_full_disk_is_a_clear_error_and_spoils_no_line(folder: RunFolder) -> None:
    """behaviour: B47"""
    folder.append_metrics({"step": 1})
    with full_disk(), pytest.raises(RunFolderError, match=r"cannot append to .*metrics\.jsonl: File too large"):
        folder.append_metrics({"step": 2, "filler": "x" * 8000})  # type: ignore[dict-item]
    folder.append_metrics({"step": 3})
    assert folder.read_metrics() == [{"step": 1}, {"step": 3}]


def test_a_summary_that_does_not_fit_leaves_the_old_one(folder: RunFolder) -> None:
    """behaviour: B47"""
    folder.write_summary({"steps": 1})
    with full_disk(), pytest.raises(RunFolderError, match=r"cannot write .*summary\.json"):
        folder.write_summary({"steps": 2, "filler": "x" * 8000})
    assert folder.read_summary() == {"steps": 1}
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_a_reader_of_the_old_summary_never_sees_half_of_the_new_one(folder: RunFolder) -> None:
    """behaviour: B13"""
    folder.write_summary({"steps": 1})
    with open(folder.summary_path) as reader:
        folder.write_summary({"steps": 2})
        assert json.load(reader) == {"steps": 1}
    assert folder.read_summary() == {"steps": 2}


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    """behaviour: B47"""
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot create"):
        RunFolder(tmp_path / "file" / "run")


def test_lines_of_several_threads_do_not_mix(folder: RunFolder) -> None:
    def write(k: int) -> None:
        for i in range(50):
            folder.append_samples([{"k": k, "i": i, "text": "x" * 500}] * 3)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = folder.samples_path.read_text().splitlines()
    assert len(lines) == 600
    assert all(len(json.loads(line)["text"]) == 500 for line in lines)
