"""The facts about each type of device, one row for each. To support another type, add a row."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    """The facts about one type of device. The defaults are for an unknown GPU."""

    type: str  # its name in torch: "cuda" stands for AMD's GPUs too
    key: str = "PrivateUse1"  # its name in the dispatcher's keys: "CUDA" in AutocastCUDA
    vendor: str = ""  # for messages
    also_called: tuple[str, ...] = ()  # by people who know their GPU, but not torch's name for it
    is_host: bool = False  # whether it is the CPU: always there, and done when a call returns
    keeps_peak: bool = True  # whether its allocator counts the most bytes that were in use
    rng_takes_index: bool = True  # whether its random state is asked for by the device's number
    pins_memory: bool = True  # whether copies to it are faster from page-locked memory
    has_graphs: bool = False  # whether torch.compile can record its kernels, as CUDA graphs do
    has_triton: bool = False  # whether Triton has kernels for it
    has_capability: bool = False
    """Whether NVIDIA GPUs are of this type; torch reports their compute capability."""
    foreach: bool = False
    """Whether torch's optimizers by default work on all parameters in one call, which needs memory
    for temporaries as large as all parameters (torch.optim, "foreach")."""
    fused_attention: bool = False  # whether torch runs flash or memory-efficient attention there
    fused_rnn_dtype: torch.dtype | None = None
    """The dtype to which autocast casts recurrent layers, whatever its own dtype, with the weights
    as one flat copy that is not cached (ATen/cudnn/AutocastRNN.cpp); None: autocast casts these
    layers like all other layers."""
    rnns_without_rule: tuple[str, ...] = ()
    """Recurrent layers that autocast does not cast, by the name of their function in torch, such
    as ``lstm``: the backend runs these layers as special ops (ATen/native/RNN.cpp)."""

    def is_available(self) -> bool:
        """Whether this machine and this torch have such a device; False for an unknown type."""
        if self.is_host:
            return True
        try:
            return torch.get_device_module(self.type).is_available()
        except (AttributeError, RuntimeError):  # torch's answer to a name that is no backend
            return False


BACKENDS = {
    row.type: row
    for row in (
        Backend(
            "cuda",
            "CUDA",
            vendor="NVIDIA, and AMD with ROCm",
            also_called=("gpu", "nvidia", "rocm", "hip", "amd"),
            has_graphs=True,
            has_triton=True,
            has_capability=True,
            foreach=True,
            fused_attention=True,
            fused_rnn_dtype=torch.float16,
        ),
        Backend("xpu", "XPU", vendor="Intel", has_triton=True, foreach=True),
        Backend(
            "mps",
            "MPS",
            vendor="Apple",
            also_called=("metal",),
            keeps_peak=False,
            pins_memory=False,  # it shares the memory of the CPU
            rng_takes_index=False,  # there is never more than one
            rnns_without_rule=("lstm",),
        ),
        Backend("cpu", "CPU", is_host=True, keeps_peak=False, pins_memory=False),
    )
}
"""The backends that amp_lab knows, by type, in the order in which messages name them."""


def backend(device: torch.device | str) -> Backend:
    """The row of a device or of a type of device; the defaults for a type without a row."""
    name = device.type if isinstance(device, torch.device) else device
    return BACKENDS.get(name, Backend(name))
