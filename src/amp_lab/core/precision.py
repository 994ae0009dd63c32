"""The `Precision` enum, and what each value means for autocast, loss scaling and TF32."""

import enum
import functools
import operator
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from amp_lab.core.backends import backend
from amp_lab.core.errors import AmpLabWarning, DeviceError

# Every place where torch keeps a mode for float32 arithmetic: cuBLAS and cuDNN (hipBLAS and MIOpen
# on ROCm), and oneDNN (the CPU and XPU). Each is "ieee", "tf32", "bf16", or "none" for unset.
_MODE_NAMES = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
# The objects of these names. A type checker does not know them, so they are found by name.
_FLOAT32_MODES = tuple(operator.attrgetter(name)(torch.backends) for name in _MODE_NAMES)
# The values of two older settings that fit a mode: float32_matmul_precision, cudnn.allow_tf32.
_OLD_SETTINGS = {"ieee": ("highest", False), "tf32": ("high", True)}


class Precision(enum.StrEnum):
    """A precision, with the settings of autocast, loss scaling and TF32 that it needs.

    - ``fp32``: IEEE single precision. TF32 is off, even where it would be on by default.
    - ``tf32``: fp32 tensors. Matmuls and convolutions may round their inputs to TF32.
    - ``fp16``: autocast to float16, with a gradient scaler.
    - ``bf16``: autocast to bfloat16, without a gradient scaler.

    Example:
        precision = Precision("bf16")
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = precision.grad_scaler("cpu")
        with precision.autocast("cpu"):
            loss = model(torch.ones(3, 4)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that enter a matmul in this precision."""
        if self is Precision.FP16:
            return torch.float16
        if self is Precision.BF16:
            return torch.bfloat16
        return torch.float32

    def autocast(self, device_type: str) -> AbstractContextManager:
        """Return a context manager that runs the forward pass in this precision.

        For ``fp16`` and ``bf16`` it is `torch.autocast`. For ``fp32`` and ``tf32`` it turns
        autocast off and sets torch's float32 mode to "ieee" or "tf32". The mode applies to the
        whole process. At the end of the block, also after an exception, every mode is restored. You
        can nest and reuse the context managers. On a device without TF32, ``tf32`` warns, and the
        device computes in fp32.

        Args:
            device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".

        Returns:
            The context manager.

        Raises:
            DeviceError: If this machine has no such device.
        """
        require_backend(device_type)
        if self in (Precision.FP16, Precision.BF16):
            return torch.autocast(device_type, dtype=self.dtype)
        if self is Precision.FP32:
            return _Float32Mode(device_type, "ieee")
        if not has_tf32(device_type):
            warnings.warn(
                f"tf32: device {device_type!r} has no TF32 here, so it computes in fp32",
                AmpLabWarning,
                stacklevel=2,
            )
        return _Float32Mode(device_type, "tf32")

    def float32_mode(self, device_type: str) -> AbstractContextManager:
        """Return a context manager for a whole step that turns TF32 off for fp32 and on for tf32.

        The step includes the backward pass. For ``fp16`` and ``bf16`` the context manager does
        nothing, because their autocast is for the forward pass only.
        """
        if self.dtype is torch.float32:
            return self.autocast(device_type)
        return nullcontext()

    def grad_scaler(self, device_type: str, **kw) -> torch.amp.GradScaler:
        """Return the `torch.amp.GradScaler` for this precision. It is enabled only for ``fp16``.

        A disabled scaler returns losses and gradients unchanged, so one loop works for every
        precision.

        Args:
            device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
            **kw: Keyword arguments of `GradScaler`. ``enabled=False`` disables it for ``fp16`` too.

        Returns:
            The scaler.

        Raises:
            DeviceError: If this machine has no such device.
        """
        require_backend(device_type)
        enabled = kw.pop("enabled", True) and self is Precision.FP16
        return torch.amp.GradScaler(device_type, enabled=enabled, **kw)


def require_backend(device_type: str) -> None:
    """Raise `DeviceError` unless a device of this type ("cpu", "cuda", …) is here."""
    if not backend(device_type).is_available():
        raise DeviceError(
            f"device {device_type!r} is not available here, with torch {torch.__version__}"
        )


@functools.cache
def has_tf32(device_type: str) -> bool:
    """Whether a float32 matmul on this device rounds its inputs to TF32 if TF32 is allowed.

    The function multiplies 1 + 2^-12 by the identity: the result is unchanged in IEEE arithmetic,
    but loses its last bit with the 10 mantissa bits of TF32. The device must be in this machine.
    """
    left = torch.full((256, 256), 1 + 2**-12, device=device_type)
    with _Float32Mode(device_type, "tf32"):
        return not torch.equal(left @ torch.eye(256, device=device_type), left)


class _Modes(NamedTuple):
    """The values of torch's float32 settings. Some have an old name and new names for one mode."""

    new: tuple[str, ...]  # one for each of _FLOAT32_MODES
    old: tuple[str, bool] | None  # matmul precision, cudnn.allow_tf32; None: not to be read or set

    @classmethod
    def read(cls) -> "_Modes":
        """The modes that are set now."""
        new = tuple(setting.fp32_precision for setting in _FLOAT32_MODES)
        try:
            old = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        except RuntimeError:  # torch refuses the old names once new ones were set differently
            old = None
        return cls(new, old)

    def write(self) -> None:
        """Set these modes in torch."""
        # The old names come first, since setting them also sets some of the new. They are set
        # because torch.compile reads them, and torch raises if they contradict the new ones.
        if self.old is not None:
            matmul_precision, allow_tf32 = self.old
            torch.set_float32_matmul_precision(matmul_precision)
            torch.backends.cudnn.allow_tf32 = allow_tf32
        for setting, mode in zip(_FLOAT32_MODES, self.new, strict=True):
            setting.fp32_precision = mode


class _Float32Mode(AbstractContextManager):
    """Autocast off, and one float32 mode, "ieee" or "tf32", everywhere until the block ends."""

    def __init__(self, device_type: str, mode: str):
        self._device_type = device_type
        self._mode = mode
        # The modes from before a block and its autocast, for each nested use of this object.
        self._saved: list[tuple[_Modes, torch.autocast]] = []

    def __enter__(self) -> None:
        before = _Modes.read()
        new = (self._mode,) * len(_FLOAT32_MODES)
        old = None
        if before.old is not None:
            old = _OLD_SETTINGS[self._mode]
        autocast = torch.autocast(self._device_type, enabled=False)
        _Modes(new, old).write()
        autocast.__enter__()
        self._saved.append((before, autocast))

    def __exit__(self, *error) -> None:
        before, autocast = self._saved.pop()
        autocast.__exit__(*error)
        before.write()
