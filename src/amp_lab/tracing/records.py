"""The records of an X-ray: one for each op and one for each cast."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from amp_lab.core.report import listed

LOSS = "(loss)"  # takes the place of a module's name in records of the loss
# Ops without "aten::", as `OpRecord.op` has them.
_LOSSES = {
    "nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "mse_loss", "huber_loss",
    "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "_ctc_loss",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward",
}  # fmt: skip
_REDUCTIONS = {"mean", "sum", "norm", "linalg_vector_norm"}
PlainArgument = int | float | bool | torch.dtype | tuple[int, ...] | None
"""The value of an argument of an op that is recorded: no tensor, text or device."""
RNN_LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # functions of torch, each a record


@dataclass(frozen=True)
class OpRecord:
    """One op that computed values, with the tensors that it got below autograd and autocast.

    Views have no record. The casts that autocast inserted are in `Xray.casts`. Attention, norms and
    recurrent layers are one record each, since their kernels depend on the GPU.
    """

    module: str  # qualified name of the module whose code ran; "": the model itself
    op: str  # such as convolution, addmm, _softmax
    in_dtypes: tuple[torch.dtype, ...]
    out_dtypes: tuple[torch.dtype, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    called: str  # the function of torch that the model called, such as conv2d, linear, mse_loss
    flops: int = 0  # of a matmul, convolution, attention or recurrent layer
    autocast: bool = True  # whether autocast was on where the function was called
    widened: bool = False  # whether autocast made the op compute on a low-precision input in fp32
    # Only for a recurrent layer or cell: the widest dtype of its products. Its state may be wider.
    product_dtype: torch.dtype | None = None
    # Only for a recurrent layer: the dtype of its input before autocast cast it.
    given_dtype: torch.dtype | None = None
    # Only for advice, so not in `Xray.to_json`: see `plain_arguments`. For a call that is one row
    # as a whole, such as attention, the arguments that were given by keyword.
    arguments: dict[str, PlainArgument] = field(default_factory=dict, repr=False, compare=False)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the op computed in; None if it has only integers.

        The dtype is `product_dtype`, or else the wider dtype of the first input and the first
        output that are not integers. A complex number counts as its two parts: complex64 as fp32.
        """
        if self.product_dtype is not None:
            return self.product_dtype
        first_dtypes = (_first_float(self.in_dtypes), _first_float(self.out_dtypes))
        return widest(dtype for dtype in first_dtypes if dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the op's outputs."""
        pairs = zip(self.out_shapes, self.out_dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


@dataclass(frozen=True)
class Cast:
    """One cast that autocast inserted."""

    module: str  # as in `OpRecord`
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    what: str  # "parameter NAME", "input 0", "output of OP in MODULE"
    cached: bool  # whether autocast keeps the result for further uses in the same block
    shape: tuple[int, ...]
    called: str  # the function of torch that needed the cast
    of_integers: bool = False  # whether the tensor holds whole numbers, such as positions

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return math.prod(self.shape) * self.to_dtype.itemsize

    @property
    def is_of_parameter(self) -> bool:
        """Whether a parameter was cast, or any view of a parameter, such as a slice."""
        return self.what.startswith("parameter ")


def is_of_loss(row: OpRecord) -> bool:
    """Whether an op is part of a loss, which the model may compute itself."""
    if row.op in _LOSSES:
        return True
    if row.op == "_log_softmax" and "cross_entropy" in row.called:  # else it may be an output
        return True
    return row.module == LOSS and row.op in _REDUCTIONS


def _first_float(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The first floating-point dtype, or that of a complex number's parts; None if none."""
    for dtype in dtypes:
        if dtype.is_floating_point or dtype.is_complex:
            return dtype.to_real()
    return None


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype with the most bytes for a value; None if there are no dtypes."""
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def place_of(module: str) -> str:
    """The name of a module for a sentence: ``'layer1.0'``, ``the model itself``, ``the loss``."""
    if not module:
        return "the model itself"
    if module == LOSS:
        return "the loss"
    return repr(module)


def work_of(rows: Iterable[OpRecord]) -> int:
    """The FLOPs of some ops together; only matmuls, convolutions, attention and RNNs have any."""
    return sum(row.flops for row in rows)


def bytes_of(records: Iterable[OpRecord | Cast]) -> int:
    """The bytes that some ops or casts write together."""
    return sum(record.nbytes for record in records)


def places_of(records: Iterable[OpRecord | Cast]) -> str:
    """The modules of some ops or casts for a sentence, each once, and at most the first three."""
    modules = dict.fromkeys(record.module for record in records)
    return listed([place_of(module) for module in modules], 3)


def sizes_not_multiples_of_8(row: OpRecord) -> str:
    """The sizes of a matmul or convolution that are not multiples of 8: "10 output features".

    "" if all of them are, and for other ops.
    """
    sizes = {}
    if row.op == "convolution":
        image, weight = row.in_shapes[:2]  # (N, C, …), (output channels, C per group, …)
        is_depthwise = weight[1] == 1 and image[1] > 1
        if is_depthwise:
            return "1 channel for each group (depthwise)"
        sizes = {"input channels": image[1], "output channels": row.out_shapes[0][1]}
    elif row.op in ("mm", "addmm"):
        left, right = row.in_shapes[-2:]  # (rows, inner), (inner, columns), after addmm's bias
        sizes = {"input features": right[0], "output features": right[1]}
        if left[0] > 8:  # with fewer rows it is the batch that is small
            sizes["rows"] = left[0]
    elif row.op in ("bmm", "baddbmm"):
        left, right = row.in_shapes[-2:]  # with a batch in front
        sizes = {"rows": left[1], "inner size": left[2], "columns": right[2]}
    return ", ".join(f"{size:,} {what}" for what, size in sizes.items() if size % 8)
