"""What real kernels refuse and fake tensors let through: dtypes that differ or hold too little."""

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
# Ops that take floating-point tensors alone, and those that take integers too, but no bools.
_OF_FLOATS = (
    "gelu silu mish hardswish hardsigmoid glu _softmax _log_softmax adaptive_max_pool2d "
    "adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
)
_OF_NO_BOOLS = "relu max_pool2d_with_indices avg_pool2d reflection_pad2d"
_FLOATS, _TYPED = frozenset(_OF_FLOATS.split()), frozenset(f"{_OF_FLOATS} {_OF_NO_BOOLS}".split())
# Ops that turn a number into the dtype of their result, and when they refuse one that is too large:
# a CPU fills in a single one without a look, and GPUs clamp in fp32.
_CONVERT_IF = {
    "fill full full_like new_full": lambda args, out: out.device.type != "cpu" or out.numel() != 1,
    "masked_fill index_fill scatter": lambda args, out: True,
    "constant_pad_nd": lambda args, out: max(args[1]) > 0,
    "clamp clamp_min clamp_max hardtanh": lambda args, out: out.device.type == "cpu",
}
_CONVERTING = {name: when for names, when in _CONVERT_IF.items() for name in names.split()}


class StrictFakeMode(FakeTensorMode):
    """A mode in which tensors, a module's own too, have no values and no memory.

    An op that torch cannot run without values raises, and is never run for real on zeros; so does
    one that gets dtypes, or a number too large for one, which the kernels of a device refuse.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        check_dtypes(func, args)
        out: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        refuses = _CONVERTING.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if refuses and getattr(out, "dtype", torch.bool).is_floating_point and refuses(args, out):
            for number in [given for given in args if isinstance(given, (int, float))]:
                torch.empty(2, dtype=out.dtype, device="cpu").fill_(number)  # raises for all
        return out


def check_dtypes(func: OpOverload, args: tuple) -> None:
    """Raise `RuntimeError` if an op gets tensors of dtypes that its kernels do not take."""
    name = func._schema.name.removeprefix("aten::")
    plain, first = name.rstrip("_"), args[0] if args else None
    if plain in _TYPED and isinstance(first, torch.Tensor):
        of_pixels = first.dtype is torch.uint8 and plain.startswith("upsample")
        fits = first.is_floating_point() or first.is_complex() or of_pixels
        if not fits and (plain in _FLOATS or first.dtype is torch.bool):
            raise RuntimeError(f"{name} takes no tensor of {first.dtype}")
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
