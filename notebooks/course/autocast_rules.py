"""What notebook 02 asks PyTorch with: a list of ops, any backend's policy, and a log of ops."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def zeros(a):
    """Four zeros in fp32, on the device of `a`."""
    return torch.zeros(4, device=a.device)


OPS = {  # each is a function of one 4x4 matrix, which also serves as weights and targets
    "linear": lambda a: F.linear(a, a),
    "matmul": lambda a: a @ a,
    "conv2d": lambda a: F.conv2d(a.reshape(1, 1, 4, 4), a.reshape(1, 1, 4, 4)),
    "relu": torch.relu,
    "add": lambda a: a + a,
    "add fp32": lambda a: a + a.float(),
    "mean": torch.mean,
    "sum": torch.sum,
    "exp": torch.exp,
    "softmax": lambda a: a.softmax(-1),
    "layer_norm": lambda a: F.layer_norm(a, (4,)),
    "batch_norm": lambda a: F.batch_norm(a, zeros(a), zeros(a)),
    "mse_loss": lambda a: F.mse_loss(a, a),
    "cross_entropy": lambda a: F.cross_entropy(a, zeros(a).long()),
    "binary_cross_entropy": lambda a: F.binary_cross_entropy(a, a),
}


def outcome(op, device, dtype):
    """The dtype that `op` returns for an input of `dtype`, shortened; "error" if it refuses."""
    matrix = torch.full((4, 4), 0.5, device=device, dtype=dtype)
    try:
        return SHORT[op(matrix).dtype]
    except RuntimeError:
        return "error"


@contextmanager
def policy_of(device_type, dtype=None):
    """Inside: fake tensors only, and the policy of `device_type`, in `dtype` or its default.

    Autocast for a device that is not there would switch itself off, so we set its switch by hand.
    """
    enabled, default = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype or default)
    try:
        with FakeTensorMode():
            yield dtype or default
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, default)


class OpLog(TorchDispatchMode):
    """While active, records each op and the dtypes of its tensor arguments in `calls`.

    It listens to PyTorch's dispatcher, through which each op goes on its way to a kernel.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [SHORT.get(arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((func.overloadpacket.__name__, dtypes))
        return func(*args, **(kwargs or {}))

    def dtypes(self, name):
        """The input dtypes of each call of op `name`."""
        return [dtypes for called, dtypes in self.calls if called == name]


def error_of(call, *args):
    """The message of the error that `call(*args)` must raise."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("this was expected to fail")
