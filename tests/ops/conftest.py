"""The fixtures of the tests of ops."""

import pytest
import torch


@pytest.fixture(scope="session")
def registered_ops(device_option) -> set[str]:
    """Returns the names of the ops for which the device has kernels."""
    key = "CUDA" if device_option == "cuda" else "CPU"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.split("::")[1] for name in names if name.startswith("fastvit::")}
