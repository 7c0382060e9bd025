"""A private Ray with one bus, for the tests that need real processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from bus.records import BusAddress
from relax.config.run import BusConfig

NAMESPACE = "bus-tests"


@pytest.fixture(scope="session")
def private_ray() -> Iterator[str]:
    """A Ray of this test session alone. Yields its namespace."""
    import os

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    # Ray puts unix sockets below it, whose paths are short by law.
    folder = tempfile.mkdtemp(prefix="rx", dir="/tmp")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=folder,
        namespace=NAMESPACE,
        object_store_memory=100 << 20,
        log_to_driver=False,
    )
    yield NAMESPACE
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def bus_config() -> BusConfig:
    return BusConfig(max_rows=512, max_bytes=64 << 20, max_deliveries=3, rpc_timeout_s=30.0)


@pytest.fixture(scope="module")
def bus_address(private_ray: str, bus_config: BusConfig) -> Iterator[BusAddress]:
    """A running bus for rows of up to 64 tokens."""
    from bus_traffic import start_bus

    from bus.lifecycle import destroy_bus

    address = start_bus(private_ray, bus_config)
    yield address
    destroy_bus(address)


@pytest.fixture
def own_bus(private_ray: str, bus_config: BusConfig) -> Iterator[BusAddress]:
    """A small bus that the test may fill or break."""
    from bus_traffic import start_bus

    from bus.lifecycle import destroy_bus

    address = start_bus(private_ray, bus_config.model_copy(update={"max_rows": 16}))
    yield address
    destroy_bus(address)
