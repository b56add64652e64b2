"""jax on the CPU with two devices; jax reads this setting when it is first used."""
import os

import pytest

if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()


@pytest.fixture(autouse=True)
def on_the_cpu():
    jax = pytest.importorskip("jax", minversion="0.9")
    with jax.default_device(jax.devices("cpu")[0]):
        yield
