"""The GPUs that `--for` and the documentation name. To support another GPU, add a row.

A row has the published figures of the manufacturer. Figures without a source are left out.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import OptionError

_MAKERS = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "intel", "graphics"}
# Words that a driver adds for the form of the module and its memory: A100-SXM4-80GB.
_FORM = re.compile(r"sxm\d?|pcie?|nvl|oam|hbm\d?e?|\d+gb|blackwell|server|workstation|edition")


@dataclass(frozen=True)
class Architecture:
    """The facts that all GPUs of a generation share."""

    name: str
    matmuls: tuple[str, ...] = ()
    """The formats in which matmuls are faster than in fp32, without emulated formats."""
    capability: tuple[int, int] | None = None
    """The lowest compute capability of NVIDIA GPUs of this generation."""
    device_type: str = "cuda"
    """torch's name for such a device; ``cuda`` for ROCm too."""


_16_BITS = ("bf16", "fp16")
_FP8 = ("tf32", *_16_BITS, "fp8")
_BLACKWELL = (*_FP8, "mxfp8", "mxfp4", "nvfp4")

# The formats are those of https://nvidia.github.io/TransformerEngine/support_matrix.html and
# https://rocm.docs.amd.com/en/latest/reference/precision-support.html, the capabilities those of
# https://developer.nvidia.com/cuda-gpus. RDNA: https://gpuopen.com/learn/wmma_on_rdna3/ and
# https://rocm.blogs.amd.com/software-tools-optimization/rdna-fp8-gemm/README.html.
PASCAL = Architecture("Pascal", capability=(6, 0))
VOLTA = Architecture("Volta", ("fp16",), capability=(7, 0))
TURING = Architecture("Turing", ("fp16",), capability=(7, 5))
TURING_GTX = Architecture("Turing without tensor cores")  # of the capability 7.5, too
AMPERE = Architecture("Ampere", ("tf32", *_16_BITS), capability=(8, 0))
ADA = Architecture("Ada", _FP8, capability=(8, 9))
HOPPER = Architecture("Hopper", _FP8, capability=(9, 0))
BLACKWELL = Architecture("Blackwell", _BLACKWELL, capability=(10, 0))
BLACKWELL_RTX = Architecture("Blackwell RTX", _BLACKWELL, capability=(12, 0))  # GB10 has 12.1
CDNA2 = Architecture("CDNA 2", _16_BITS)
CDNA3 = Architecture("CDNA 3", _FP8)  # its FP8 is fnuz
CDNA4 = Architecture("CDNA 4", (*_16_BITS, "fp8", "mxfp8", "mxfp4"))
RDNA3 = Architecture("RDNA 3", _16_BITS)  # RDNA 3.5, too
RDNA4 = Architecture("RDNA 4", (*_16_BITS, "fp8"))
ARC = Architecture("Arc", _16_BITS, device_type="xpu")
APPLE = Architecture("Apple M1 to M4", device_type="mps")  # hardly faster in 16 bits
APPLE_M5 = Architecture("Apple M5", _16_BITS, device_type="mps")  # has units for matmuls


@dataclass(frozen=True)
class Gpu:
    """A GPU, with its peak rates without sparsity and the shares of them that kernels reach."""

    name: str  # as its maker writes it
    architecture: Architecture
    memory_gb: int | None  # as it is sold; None if it shares the memory of the CPU
    source: str  # where the figures are from
    rates: Mapping[int, float] = field(default_factory=dict)
    """Operations per second of a matmul with sums in fp32, by the bits of its operands."""
    bandwidth: float | None = None  # bytes per second
    share_of_rate: float = 0.78  # this and the next are torchao's figures, from measurements
    share_of_bandwidth: float = 0.92

    @property
    def key(self) -> str:
        """The name for `--for`, such as ``rtx-4090``."""
        return self.name.lower().replace(" ", "-")

    @property
    def memory_bytes(self) -> int | None:
        """The memory, with the advertised number of GB taken as GiB, which is about right.

        Memory with error correction has up to a sixteenth less. The forecasts leave a tenth free.
        """
        if self.memory_gb is None:
            return None
        return self.memory_gb * 2**30


_NVIDIA = "https://www.nvidia.com/en-us/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"
_INTEL = "https://www.intel.com/content/www/us/en/products/sku/"
_ADA_PAPER = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
# It names the data sheet of each.
_TORCHAO = "https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py"
# Reports of what NVIDIA has announced.
_RTX_50 = (
    "https://www.tweaktown.com/news/102469/nvidia-geforce-rtx-50-series-specs-pricing-and-"
    "performance-plan-that-upgrade-today/index.html"
)
_RTX_5060 = (
    "https://hi-tech.ua/en/nvidia-geforce-rtx-5060-graphics-cards-will-go-on-sale-from-may-19/"
)
_ROCM = "https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_HARDWARE = "https://huggingface.co/hardware/"
# Operations per second by the bits of the operands, see `Gpu.rates`.
_H100_RATES = {16: 989e12, 8: 1979e12}
_B200_RATES = {16: 2.25e15, 8: 4.5e15, 4: 9e15}
_B200_BANDWIDTH = 7680 / 8 * 3.996e9 * 2  # 7,680 bits at 3.996 GHz, two transfers per cycle

GPUS = {
    gpu.key: gpu
    for gpu in (
        Gpu("GTX 1080 Ti", PASCAL, 11, f"{_NVIDIA}geforce/10-series/"),
        Gpu("P100", PASCAL, 16, f"{_NVIDIA}data-center/tesla-p100/"),
        Gpu("GTX 1660", TURING_GTX, 6, f"{_NVIDIA}geforce/graphics-cards/16-series/"),
        # Also sold with 32 GB. The rate is that of the SXM2 module.
        Gpu("V100", VOLTA, 16, f"{_NVIDIA}data-center/v100/", {16: 125e12}, 9e11),
        Gpu("T4", TURING, 16, f"{_NVIDIA}data-center/tesla-t4/", {16: 65e12}, 3e11),
        Gpu("RTX 2080 Ti", TURING, 11, _ADA_PAPER),
        Gpu("A100", AMPERE, 80, f"{_NVIDIA}data-center/a100/", {16: 312e12}, 2.039e12),
        Gpu("A10", AMPERE, 24, f"{_NVIDIA}data-center/products/a10-gpu/"),
        Gpu("RTX 3090", AMPERE, 24, f"{_NVIDIA}geforce/graphics-cards/30-series/rtx-3090-3090ti/"),
        Gpu("L4", ADA, 24, f"{_NVIDIA}data-center/l4/", {16: 121e12, 8: 242e12}, 3e11),
        Gpu("L40S", ADA, 48, f"{_NVIDIA}data-center/l40s/", {16: 362e12, 8: 733e12}, 8.64e11),
        Gpu("RTX 4090", ADA, 24, _ADA_PAPER, {16: 165.2e12, 8: 330.3e12}, 1.008e12),
        # The bandwidth is that of torchao's H100. The SXM5 module is sold with 3.35e12.
        Gpu("H100", HOPPER, 80, _TORCHAO, _H100_RATES, 2.4e12),
        Gpu("H200", HOPPER, 141, f"{_NVIDIA}data-center/h200/", _H100_RATES, 4.8e12),
        Gpu("B200", BLACKWELL, 180, _TORCHAO, _B200_RATES, _B200_BANDWIDTH),
        Gpu(
            "B300",
            BLACKWELL,
            270,
            _TORCHAO,
            {16: 2.25e15, 8: 4.5e15, 4: 14e15},
            8e12,
            share_of_rate=0.82,
            share_of_bandwidth=0.84,
        ),
        Gpu("GB200", BLACKWELL, 186, _TORCHAO, _B200_RATES, 8e12),
        Gpu(
            "RTX 5090",
            BLACKWELL_RTX,
            32,
            "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
            "nvidia-rtx-blackwell-gpu-architecture.pdf",
            {16: 209.5e12, 8: 419e12, 4: 1676e12},
            1.792e12,
        ),
        Gpu("RTX 5080", BLACKWELL_RTX, 16, _RTX_50),
        Gpu("RTX 5070 Ti", BLACKWELL_RTX, 16, _RTX_50),
        Gpu("RTX 5070", BLACKWELL_RTX, 12, _RTX_50),
        Gpu("RTX 5060 Ti", BLACKWELL_RTX, 16, _RTX_5060),  # also sold with 8
        Gpu("RTX 5060", BLACKWELL_RTX, 8, _RTX_5060),
        Gpu(
            "RTX PRO 6000",
            BLACKWELL_RTX,
            96,
            "https://itdaily.com/news/workplace/nvidia-rtx-pro-blackwell/",
        ),
        # DGX Spark
        Gpu("GB10", BLACKWELL_RTX, None, "https://developer.nvidia.com/cuda-gpus"),
        Gpu(
            "MI210",
            CDNA2,
            64,
            "https://www.amd.com/content/dam/amd/en/documents/instinct-business-docs/"
            "product-briefs/instinct-mi210-brochure.pdf",
            {16: 181e12},
            1.6e12,
        ),
        # One of its two dies: each is a device of its own to torch.
        Gpu("MI250X", CDNA2, 64, f"{_AMD}mi200/mi250x.html", {16: 191.5e12}, 1.6e12),
        Gpu("MI300X", CDNA3, 192, _TORCHAO, {16: 1307e12, 8: 2614e12}, 5.3e12),
        Gpu("MI325X", CDNA3, 256, f"{_AMD}mi300/mi325x.html", {16: 1307e12, 8: 2614e12}, 6e12),
        Gpu("MI350X", CDNA4, 288, f"{_AMD}mi350/mi350x.html", {16: 2309e12, 8: 4614e12}, 8e12),
        Gpu("MI355X", CDNA4, 288, f"{_AMD}mi350/mi355x.html", {16: 2516e12, 8: 5033e12}, 8e12),
        Gpu("MI350P", CDNA4, 144, _ROCM),
        Gpu("RX 7900 XTX", RDNA3, 24, _ROCM),
        Gpu("Strix Halo", RDNA3, None, _ROCM),  # Radeon 8060S of the Ryzen AI Max+ 395
        Gpu("RX 9060 XT", RDNA4, 16, _ROCM),
        Gpu("RX 9070 XT", RDNA4, 16, _ROCM),
        Gpu("AI PRO R9700", RDNA4, 32, _ROCM),
        Gpu(
            "Arc A770", ARC, 16, f"{_INTEL}229151/intel-arc-a770-graphics-16gb/specifications.html"
        ),
        Gpu("Arc B580", ARC, 12, f"{_INTEL}241598/intel-arc-b580-graphics/specifications.html"),
        Gpu("Arc Pro B50", ARC, 16, f"{_HARDWARE}arc-b50"),
        Gpu("Arc Pro B60", ARC, 24, "https://github.com/marfrit/arcint"),
        Gpu("Arc Pro B70", ARC, 32, f"{_HARDWARE}arc-pro-b70"),
        Gpu("Apple M4", APPLE, None, "https://support.apple.com/en-us/121552"),
        Gpu("Apple M5", APPLE_M5, None, "https://github.com/ml-explore/mlx/issues/3196"),
    )
}
"""The GPUs by the name that `--for` takes."""


def gpu_of(name: str) -> Gpu:
    """The GPU with a name, such as ``rtx-4090`` or ``NVIDIA A100-SXM4-80GB``.

    Raises `OptionError` with the closest names for an unknown one.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    model = [word for word in words if word not in _MAKERS and not _FORM.fullmatch(word)]
    key = "-".join(model)
    if key in GPUS:
        return GPUS[key]
    close = difflib.get_close_matches(key, GPUS, n=5, cutoff=0.4)
    if not close:
        raise OptionError(f"{name!r} is not in the table of GPUs: use one of {', '.join(GPUS)}")
    raise OptionError(f"{name!r} is not in the table of GPUs; the closest are {', '.join(close)}")


def matmuls_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """The formats in which an NVIDIA GPU of a compute capability multiplies faster than in fp32."""
    # Those of the newest generation whose lowest capability is not above the given one.
    newest = (0, 0)
    matmuls: tuple[str, ...] = ()
    for gpu in GPUS.values():
        first = gpu.architecture.capability
        if first is not None and newest < first <= capability:
            newest = first
            matmuls = gpu.architecture.matmuls
    return matmuls


def absent_gpu(name: str) -> Gpu:
    """The GPU that ``--for NAME`` names, which need not be in this machine.

    `name` is a GPU, such as ``rtx-4090``, or a type of device, such as ``cuda`` or ``rocm``: then
    the result is `unknown_gpu`. Raises `OptionError` for another name.
    """
    for row in BACKENDS.values():
        if name in (row.type, *row.also_called):
            return unknown_gpu(row.type)
    return gpu_of(name)


def unknown_gpu(device_type: str) -> Gpu:
    """A row for a GPU if only the type is known, such as ``cuda``."""
    architecture = Architecture(device_type, _16_BITS, device_type=device_type)
    return Gpu(device_type, architecture, memory_gb=None, source="")
