"""What real kernels refuse and fake tensors let through: tensors of different dtypes in one op."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

# By the places of the arguments that must be of one dtype: the names of ops. Seen on a CPU, and in
# the checks of the CUDA kernels (ATen/native/cuda); ops that fake tensors check are not here.
_ALIKE_AT = {
    (0, 1): "mm mv _grouped_mm grid_sampler_2d grid_sampler_3d _cdist_forward",
    (0, 2): "index_put index_put_ _index_put_impl_ nll_loss_forward nll_loss2d_forward",
    (0, 3): "index_add index_add_ index_copy index_copy_",
    (0, 1, 2): "addmm addmv addbmm convolution binary_cross_entropy",
}
_ALIKE = {name: places for places, names in _ALIKE_AT.items() for name in names.split()}
# Refused on a CPU alone: fp32 data with weights and statistics in low precision.
_WIDE_DATA = {"native_batch_norm": (0, 1, 2), "native_layer_norm": (0, 2, 3)}


class StrictFakeMode(FakeTensorMode):
    """Fake tensors that refuse mixed dtypes where the kernels of a real device do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        check_dtypes(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def check_dtypes(func: OpOverload, args: tuple) -> None:
    """Raise `RuntimeError` if an op gets tensors whose dtypes its kernels do not take together."""
    name = func._schema.name.removeprefix("aten::")
    if name in _ALIKE:
        require_alike(name, [args[place] for place in _ALIKE[name] if place < len(args)])
    elif name in _WIDE_DATA:
        given = [args[place] for place in _WIDE_DATA[name]]
        data, *weights = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        if data.device.type == "cpu" and any(w.itemsize < data.itemsize for w in weights):
            require_alike(name, [data, *weights])


def require_alike(name: str, given: list[Any]) -> None:
    """Raise `RuntimeError` unless all tensors among the arguments of an op are of one dtype."""
    dtypes = [tensor.dtype for tensor in given if isinstance(tensor, torch.Tensor)]
    others = [dtype for dtype in dtypes if dtype is not dtypes[0]]
    if others:
        raise RuntimeError(
            f"{name} takes tensors of one dtype, and got {dtypes[0]} and {others[0]}"
        )
