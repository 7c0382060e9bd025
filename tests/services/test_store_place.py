"""Whether an instance reads the trainer's memory or pulls over TCP: by where both are, never by trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax.weights.tcp import WeightSource, is_loopback
from services.dcs.api import StorePlace, Unreachable

HERE, AWAY = "a" * 56, "b" * 56


def place(transport: Any, host: str | None) -> StorePlace:
    source = None if host is None else WeightSource(host, 1234, "s")
    return StorePlace(HERE, "/dev/shm/relax-run-1", 2, 0, transport, source)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_on_the_trainers_node_auto_reads_the_memory_and_tcp_pulls(host: str) -> None:
    assert place("auto", host).source_for(HERE) is None
    assert place("shared_memory", None).source_for(HERE) is None
    assert place("tcp", host).source_for(HERE) == WeightSource(host, 1234, "s")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_on_another_node_weights_are_pulled(transport: str) -> None:
    assert place(transport, "10.0.0.1").source_for(AWAY) == WeightSource("10.0.0.1", 1234, "s")


@pytest.mark.parametrize(
    ("transport", "host", "key"),
    [("auto", "127.0.0.1", "set dcs.host"), ("tcp", "::1", "set dcs.host"), ("shared_memory", None, "dcs.transport")],
)
def test_what_another_node_cannot_reach_is_told_with_the_key_to_set(transport: str, host: str | None, key: str) -> None:
    with pytest.raises(Unreachable, match=f"node {AWAY[:8]} .*{key}"):
        place(transport, host).source_for(AWAY)


def test_copies_lie_beside_the_store_and_apart_for_each_node() -> None:
    roots = {place("tcp", "10.0.0.1").cache_root(node) for node in (HERE, AWAY)}
    assert roots == {Path(f"/dev/shm/relax-run-1-{node[:12]}.cache") for node in (HERE, AWAY)}


def test_loopback_is_known_by_address_and_by_name() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "fd00::1", "node-7"))
