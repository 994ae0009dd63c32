"""backends: what its rows say agrees with torch."""

import pytest
import torch

from amp_lab.core.backends import BACKENDS, backend


@pytest.mark.parametrize("row", BACKENDS.values(), ids=BACKENDS)
def test_the_keys_are_those_of_torch(row):
    autocast = f"Autocast{row.key}"
    assert torch._C._dispatch_get_registrations_for_dispatch_key(autocast)
    assert hasattr(torch._C._autograd.DeviceType, row.key)
    torch.get_autocast_dtype(row.type)


def test_foreach_is_for_the_devices_that_torchs_optimizers_name():
    found = torch.utils._foreach_utils._get_foreach_kernels_supported_devices()
    assert {name for name, row in BACKENDS.items() if row.foreach} <= set(found)
    assert not backend("cpu").foreach


def test_the_cpu_is_here_and_what_no_backend_is_called_is_not():
    assert backend("cpu").is_available()
    assert backend(torch.device("cpu")) is BACKENDS["cpu"]
    assert not backend("no such thing").is_available()
    assert backend("cuda").is_available() == torch.cuda.is_available()


def test_another_accelerator_has_the_defaults():
    row = backend("hpu")
    assert (row.type, row.key) == ("hpu", "PrivateUse1")
    assert (row.is_host, row.foreach) == (False, False)
