"""What is true of each type of device, a row for each: to support another, add a row.

What depends on the machine, and not on the type alone, is measured or asked of torch: see `device`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    """The facts about one type of device. The defaults are for a GPU of which nothing is known."""

    type: str
    """Its name in torch, such as ``cuda``, which stands for AMD's GPUs too."""
    key: str = "PrivateUse1"
    """Its part of the dispatcher's keys, such as ``AutocastCUDA``."""
    made_by: str = ""
    """Whose devices these are, for messages."""
    also_called: tuple[str, ...] = ()
    """What people type who know their card, but not torch's name for it."""
    is_host: bool = False
    """Whether it is the CPU itself: always there, it has done its work when a call returns, needs
    no stream and no copy from it, and rounds no size up to that of a matrix unit."""
    keeps_peak: bool = True
    """Whether its allocator counts the largest number of bytes that were in use."""
    rng_takes_index: bool = True
    """Whether its random state is asked for by the device's number."""
    pins_memory: bool = False
    """Whether copies to it are faster from page-locked memory."""
    has_graphs: bool = False
    """Whether `torch.compile` can record its kernels and replay them, as CUDA graphs do."""
    foreach: bool = False
    """Whether torch's optimizers work on all parameters in one call, unless told otherwise, and
    then need room for temporaries as large as all of them (torch.optim, "foreach")."""
    fused_attention: bool = False
    """Whether attention runs in torch's flash or memory-efficient kernel, chosen as for CUDA."""
    fused_rnn_dtype: torch.dtype | None = None
    """What autocast casts fused recurrent layers to, whatever its own dtype, and the weights as one
    flat copy that it does not cache; None: they are cast as all else.
    Source: ATen/cudnn/AutocastRNN.cpp."""
    rnns_without_rule: tuple[str, ...] = ()
    """Fused recurrent layers that autocast leaves alone. Source: ATen/native/RNN.cpp, where MPS
    runs an op of its own that has no rule."""

    @property
    def autocast_key(self) -> str:
        """The dispatch key of its autocast kernels."""
        return f"Autocast{self.key}"

    @property
    def autograd_key(self) -> str:
        """The dispatch key of its autograd kernels."""
        return f"Autograd{self.key}"

    def is_available(self) -> bool:
        """Whether this machine and this torch have such a device; False for no backend's name."""
        if self.is_host:
            return True
        try:
            return torch.get_device_module(self.type).is_available()
        except (AttributeError, RuntimeError):  # torch's answer to a name that is no backend
            return False

    def has_fake_guard(self) -> bool:
        """Whether `FakeTensorMode` itself keeps torch from looking for the device."""
        return self.is_host or (self.type == "cuda" and torch.backends.cuda.is_built())


BACKENDS = {
    row.type: row
    for row in (
        Backend(
            "cuda",
            "CUDA",
            made_by="NVIDIA, and AMD with ROCm",
            also_called=("gpu", "nvidia", "rocm", "hip", "amd"),
            pins_memory=True,
            has_graphs=True,
            foreach=True,
            fused_attention=True,
            fused_rnn_dtype=torch.float16,
        ),
        Backend("xpu", "XPU", made_by="Intel", foreach=True),
        Backend(
            "mps",
            "MPS",
            made_by="Apple",
            also_called=("metal",),
            keeps_peak=False,  # recommended_max_memory is all that it tells
            rng_takes_index=False,  # there is never more than one
            rnns_without_rule=("lstm",),
        ),
        Backend("cpu", "CPU", is_host=True, keeps_peak=False),
    )
}
"""The backends whose autocast torch has, by type, in the order in which messages name them."""


def backend(device: torch.device | str) -> Backend:
    """The row of a device or of a type of device; the defaults for a type without one."""
    name = device.type if isinstance(device, torch.device) else device
    return BACKENDS.get(name, Backend(name))
