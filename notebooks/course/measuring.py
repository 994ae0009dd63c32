"""What notebook 04 counts about a step, and how it checks a measured time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from amp_lab import Comparison, DeviceReport, Precision

_MARGIN = 1.5  # a convolution may come out somewhat better than the matmul that was timed


def flops_of(function: Callable[[], object]) -> int:
    """Multiplications and additions of one call, counted and not timed."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def is_possible(times: Comparison, precision: Precision, flops: int, report: DeviceReport) -> bool:
    """Whether the device can do `flops` in the time measured, and gain so much over FP32.

    The limits are the rates of the matmuls that `describe_device` has timed. A speed-up may also
    come from bytes: a 16-bit number has half of them, which allows 2x.
    """
    if not (times.trusted and report.trusted):
        return True  # nothing has been claimed
    fp32_rate = report.rates[Precision.FP32]  # FLOP/s
    own_rate = report.rates[precision]
    assert fp32_rate is not None
    assert own_rate is not None, f"{precision} is not to be had on this device"
    rate = times.time_s(precision).rate(flops)
    gain = times.ratio(Precision.FP32, precision)
    # An emulated precision computes in fp32, and in a convolution perhaps better than in a matmul.
    within_rate = rate.median <= _MARGIN * max(own_rate, fp32_rate)
    return within_rate and gain.median <= _MARGIN * max(2, own_rate / fp32_rate)


def saved_bytes(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> int:
    """Bytes that autograd saves for the backward pass of `loss_of(model)`.

    Each storage counts once; those of the parameters, which are there anyway, do not count.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    assert loss.requires_grad  # the graph is alive, so no storage has been reused for another
    return sum(size for address, size in saved.items() if address not in parameters)
