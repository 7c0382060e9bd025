"""A node's own copies of published weights, shared by the processes on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
import torch

from relax.config.run import Fault
from relax.types import PolicyVersion
from relax.weights.cache import WeightCache
from relax.weights.manifest import CorruptWeights, Manifest, VersionGone
from relax.weights.store import ReadableVersion, WeightStore
from relax.weights.tcp import TransferFailed
from relax.weights.tcp_server import WeightServer

USER = """
import json, sys
from pathlib import Path
from relax.types import PolicyVersion
from relax.weights.cache import WeightCache
from relax.weights.tcp import WeightSource

root, source = Path(sys.argv[1]), WeightSource(**json.loads(sys.argv[2]))
cache = WeightCache(root, keep=2)
for line in sys.stdin:
    version, digest = line.split()
    print(cache.fetch(source, PolicyVersion(int(version)), digest, 30.0, on_retry=print), flush=True)
cache.close()
"""


class User:
    """A process that uses a cache: `fetch` sends, `result` waits."""

    def __init__(self, root: Path, server: WeightServer):
        source = server.source
        text = json.dumps({"host": source.host, "port": source.port, "secret": source.secret})
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(root), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fetch(self, manifest: Manifest) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{manifest.version} {manifest.digest}\n")
        self.process.stdin.flush()

    def result(self) -> Path:
        assert self.process.stdout
        return Path(self.process.stdout.readline().strip())

    def leave(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=4)


@pytest.fixture
def server(store: WeightStore) -> Iterator[WeightServer]:
    made = WeightServer(store, "127.0.0.1", 30.0)
    yield made
    made.close()


@pytest.fixture
def user(tmp_path: Path, server: WeightServer) -> Iterator[Callable[[], User]]:
    made: list[User] = []

    def start() -> User:
        made.append(User(tmp_path / "node" / "relax-run-1.cache", server))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(30)
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe is not None:
                pipe.close()


def publish(store: WeightStore, number: int, faults: tuple[Fault, ...] = ()) -> Manifest:
    tensors = [(f"layer.{i}", torch.full((64, 64), float(number + i))) for i in range(4)]
    return store.publish(PolicyVersion(number), number, tensors, 1 << 15, faults=faults)


def fetch(cache: WeightCache, server: WeightServer, manifest: Manifest) -> Path:
    return cache.fetch(
        server.source, PolicyVersion(manifest.version), manifest.digest, 30.0, on_retry=lambda reason: None
    )


def test_the_processes_of_a_node_pull_a_version_once_and_the_last_one_removes_the_copies(
    tmp_path: Path, store: WeightStore, server: WeightServer, user: Callable[[], User]
) -> None:
    """behaviour: B33"""
    published = publish(store, 1)
    users = [user(), user()]
    for one in users:
        one.fetch(published)
    [first, second] = [one.result() for one in users]
    assert first == second == tmp_path / "node" / "relax-run-1.cache" / "v00000001"
    assert ReadableVersion(first).verify() == published.digest
    assert server.counts["served"] == 1
    users[0].leave()
    assert first.exists(), "somebody still uses it"
    users[1].leave()
    assert list((tmp_path / "node").iterdir()) == []


def test_copies_left_by_killed_processes_are_removed_by_the_next_user(
    tmp_path: Path, store: WeightStore, server: WeightServer, user: Callable[[], User]
) -> None:
    """behaviour: B33"""
    dead, alive = user(), WeightCache(tmp_path / "node" / "relax-other-1.cache", keep=2)
    dead.fetch(publish(store, 1))
    dead.result()
    (tmp_path / "node" / "relax-store").mkdir()
    dead.process.kill()
    dead.process.wait(30)
    assert (tmp_path / "node" / "relax-run-1.cache").exists()
    WeightCache(tmp_path / "node" / "relax-third-1.cache", keep=2).close()
    assert sorted(path.name for path in (tmp_path / "node").iterdir()) == ["relax-other-1.cache", "relax-store"]
    alive.close()


def test_a_user_that_was_killed_while_it_pulled_blocks_nobody(
    tmp_path: Path, store: WeightStore, server: WeightServer
) -> None:
    """behaviour: B1"""
    cache = WeightCache(tmp_path / "relax-run-1.cache", keep=2)
    torn = cache.root / ".pull-0123"
    torn.mkdir()
    (torn / "manifest.json").write_text("{")
    published = publish(store, 1)
    assert ReadableVersion(fetch(cache, server, published)).verify() == published.digest
    assert not torn.exists()
    cache.close()


@pytest.mark.parametrize("fault", [Fault.CORRUPT_BUCKET, Fault.DROP_TENSOR])
def test_a_damaged_source_is_refused_whole_and_the_last_copy_stays(
    tmp_path: Path, store: WeightStore, server: WeightServer, fault: Fault
) -> None:
    """behaviour: B2 B4"""
    cache = WeightCache(tmp_path / "relax-run-1.cache", keep=2)
    good = fetch(cache, server, publish(store, 1))
    with pytest.raises(CorruptWeights):
        fetch(cache, server, publish(store, 2, (fault,)))
    assert sorted(path.name for path in cache.root.iterdir() if path.name != ".lock") == [good.name]
    assert fetch(cache, server, publish(store, 3)).name == "v00000003"
    cache.close()


def test_the_last_used_copies_stay_and_a_reader_keeps_what_it_mapped(
    tmp_path: Path, store: WeightStore, server: WeightServer
) -> None:
    """An evaluation asks for an older version after newer ones: it must not be collected before it is read."""
    cache = WeightCache(tmp_path / "relax-run-1.cache", keep=2)
    published = [publish(store, number) for number in (1, 2, 3)]
    first = ReadableVersion(fetch(cache, server, published[0]))
    for manifest in published[1:]:
        fetch(cache, server, manifest)
    assert sorted(path.name for path in cache.root.glob("v*")) == ["v00000002", "v00000003"]
    assert first.verify() == published[0].digest
    assert fetch(cache, server, published[0]).exists()
    assert sorted(path.name for path in cache.root.glob("v*")) == ["v00000001", "v00000003"]
    cache.close()


def test_a_collected_version_leaves_nothing(tmp_path: Path, store: WeightStore, server: WeightServer) -> None:
    cache = WeightCache(tmp_path / "relax-run-1.cache", keep=2)
    published = publish(store, 1)
    for number in (2, 3, 4, 5):
        publish(store, number)
    with pytest.raises(VersionGone):
        fetch(cache, server, published)
    assert [path.name for path in cache.root.iterdir()] == [".lock"]
    cache.close()
    assert not cache.root.exists()


def test_one_process_pulls_at_a_time_and_the_others_wait_no_longer_than_their_deadline(
    tmp_path: Path, store: WeightStore, server: WeightServer
) -> None:
    cache = WeightCache(tmp_path / "relax-run-1.cache", keep=2)
    published = publish(store, 1)
    with filelock.FileLock(cache.root / ".lock"), pytest.raises(TransferFailed, match="another process still pulled"):
        cache.fetch(server.source, PolicyVersion(1), published.digest, 0.2, on_retry=lambda reason: None)
    assert server.counts == {}
    assert fetch(cache, server, published).exists()
    cache.close()
