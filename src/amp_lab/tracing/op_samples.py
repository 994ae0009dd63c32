"""Arguments to call an op with, made from the names and types in its schema."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from amp_lab.core.torch_versions import dimension_by_name

_N = 4  # the size of every dimension, unless the op needs another


class _Index(tuple):
    """The shape of a tensor of indices, which are all 0."""


class _Pivots(tuple):
    """The shape of a tensor of LAPACK's indices, which start at 1."""


# Values for arguments of these names, in any op. A tuple stands for a tensor of this shape, with
# floating-point numbers unless the tuple is of one of the classes above. A list has several values,
# which `_from_table` fits to the argument.
_BY_NAME = {
    "dim": [0],
    "dims_self": [0],
    "dims_other": [0],
    "equation": "ij,jk->ik",
    "indices": [_Index((1,))],  # of index_put; an op with one tensor of indices is below
    "n_fft": _N,
    "normalized_shape": [_N],
    "output_padding": [0, 0],
    "train": True,
    "training": True,
}

# Values by the type in the schema, for arguments of other names. Numbers are 1.
_BY_TYPE = {"bool": False, "str": "nuc"}  # a name of a matrix norm

# Tensors that some ops take as floating-point numbers, and others as indices.
_MAYBE_INDICES = ("index", "target", "targets")

# Arguments of ops whose tensors differ in size. For all other ops `sizes_to_try` finds the sizes.
_VECTOR = (_N,)
_CUBE = (_N, _N, _N)
_IMAGE = (_N, _N, _N, _N)
_VOLUME = (_N, _N, _N, _N, _N)
# The gates of a recurrent layer lie side by side in one tensor: three in a GRU, four in an LSTM. So
# do queries, keys and values.
_GATES_3 = (_N, 3 * _N)
_GATES_4 = (_N, 4 * _N)
_WEIGHT_3 = (3 * _N, _N)
_WEIGHT_4 = (4 * _N, _N)
_BIAS_3 = (3 * _N,)
_BIAS_4 = (4 * _N,)
_STATE = (1, _N, _N)
_HEADS = (1, 1, 8, 8)  # (B, H, T, D)
_ATTENTION = {"query": _CUBE, "key": _CUBE, "value": _CUBE}
_CONVOLUTION = {"input": _IMAGE, "self": _IMAGE, "weight": _IMAGE}
_LSTM = {"input": _CUBE, "batch_sizes": [], "mode": 2, "hidden_size": _N}
_BY_OP: dict[str, dict[str, Any]] = {
    "_convolution": _CONVOLUTION,
    "_mps_convolution": _CONVOLUTION,
    "convolution": _CONVOLUTION,
    "cudnn_convolution": _CONVOLUTION,
    "cudnn_convolution_transpose": _CONVOLUTION,
    "_cudnn_rnn": _LSTM | {
        "weight": [_WEIGHT_4, _WEIGHT_4, _BIAS_4, _BIAS_4], "weight_stride0": 4,
        "hx": _STATE, "cx": _STATE, "proj_size": 0,
    },
    "_native_multi_head_attention": _ATTENTION | {
        "embed_dim": _N, "qkv_weight": _WEIGHT_3, "qkv_bias": _BIAS_3, "proj_bias": _VECTOR
    },
    "_scaled_dot_product_flash_attention": {"query": _HEADS, "key": _HEADS, "value": _HEADS},
    "_thnn_fused_gru_cell": {"input_gates": _GATES_3, "hidden_gates": _GATES_3},
    "_thnn_fused_lstm_cell": {"input_gates": _GATES_4, "hidden_gates": _GATES_4},
    "cross": {"self": (_N, 3), "other": (_N, 3)},
    "ctc_loss": {"input_lengths": [_N] * _N, "target_lengths": [0] * _N},
    "fractional_max_pool2d": {"random_samples": (_N, _N, 2)},
    "fractional_max_pool3d": {"random_samples": (_N, _N, 3)},
    "grid_sampler": {"grid": (_N, _N, _N, 2)},
    "grid_sampler_2d": {"grid": (_N, _N, _N, 2)},
    "_grid_sampler_2d_cpu_fallback": {"grid": (_N, _N, _N, 2)},
    "grid_sampler_3d": {"grid": (_N, _N, _N, _N, 3)},
    "index_copy": {"index": _Index(_VECTOR)},
    "gru_cell": {"w_ih": _WEIGHT_3, "w_hh": _WEIGHT_3},
    "lstm_cell": {"w_ih": _WEIGHT_4, "w_hh": _WEIGHT_4},
    "lu_solve": {"LU_pivots": _Pivots(_VECTOR)},
    "max_unpool2d": {"indices": _Index(_IMAGE)},
    "max_unpool3d": {"indices": _Index(_VOLUME)},
    "mkldnn_rnn_layer": _LSTM | {"weight2": _BIAS_4, "weight3": _BIAS_4},
    "nll_loss2d": {"target": _Index(_CUBE)},
    "linalg_tensorinv": {"ind": 1},
    "stft": {"return_complex": True},
    "view_as_complex": {"self": (_N, 2)},
}  # fmt: skip


class Sizes(NamedTuple):
    """Shapes for the tensor arguments of an op that the tables above do not list."""

    shapes: Iterable[tuple[int, ...]]  # in the order of the arguments
    with_indices: bool = False  # whether tensors named in `_MAYBE_INDICES` get integers


def sizes_to_try(op: OpOverload) -> Iterator[Sizes]:
    """Yield shapes that the op may take, to be tried one after the other.

    First all tensors have the same number of dimensions, then different numbers. If a tensor has a
    name in `_MAYBE_INDICES`, the same shapes follow with integers for this tensor.
    """
    names = [argument.name for argument in op._schema.arguments if _needs_shape(op, argument)]
    # Most ops take two dimensions, so those come first. A fourth tensor is like the third.
    combinations = itertools.product((2, 1, 3, 4, 5), repeat=min(len(names), 3))
    alike_first = sorted(combinations, key=lambda dims: len(set(dims)))
    for dims in alike_first:
        yield Sizes(_shapes(dims, len(names)))
    if set(names).isdisjoint(_MAYBE_INDICES):
        return
    for dims in alike_first:
        yield Sizes(_shapes(dims, len(names)), with_indices=True)


def _shapes(dims: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """`count` shapes with `dims` as their numbers of dimensions; the last number is repeated.

    With `dims` (1, 2) and a `count` of 3 they are (4,), (4, 4) and (4, 4).
    """
    missing = count - len(dims)
    repeated = dims[-1:] * missing
    return [(_N,) * dim for dim in (*dims, *repeated)]


class Sample:
    """Arguments for a call of an op; `arguments` has them by name.

    The first floating-point tensor has the dtype `first`, all others have `rest`. `sizes` has the
    shapes of the tensors that the tables above do not list.
    """

    def __init__(
        self, op: OpOverload, device_type: str, first: torch.dtype, rest: torch.dtype, sizes: Sizes
    ):
        self.float_dtypes: list[torch.dtype] = []  # of its floating-point tensors, in order
        self._op = op
        self._device = torch.device(device_type)
        self._dtypes = itertools.chain([first], itertools.repeat(rest))
        self._shapes = iter(sizes.shapes)
        self._with_indices = sizes.with_indices
        self.arguments = {argument.name: self._value(argument) for argument in op._schema.arguments}

    def _value(self, argument: torch.Argument) -> Any:
        """A value for an argument, from the first of these that has one.

        They are the op's row in `_BY_OP`, the argument's default, its name in `_BY_NAME`, a shape
        of `Sizes`, and its type.
        """
        name = argument.name
        # The op's row comes before a default: some defaults do not fit the shapes here.
        values_of_op = _values_of_op(self._op)
        if name in values_of_op:
            return self._from_table(values_of_op[name], argument)
        if argument.has_default_value():
            return argument.default_value
        if name in _BY_NAME:
            return self._from_table(_BY_NAME[name], argument)
        if _needs_shape(self._op, argument):
            return self._of_next_shape(argument)
        type_name = str(argument.type)
        if type_name.startswith("List"):
            # N is the length that the schema asks for, as in ``int[2]``; None: any, so here 2.
            return [1] * (argument.N or 2)  # pyrefly: ignore[missing-attribute]: not in the stub
        if type_name.startswith("Optional"):
            return None
        return _BY_TYPE.get(type_name, 1)

    def _of_next_shape(self, argument: torch.Argument) -> Any:
        """A tensor of the next shape in `Sizes`, or two for an argument that takes a list."""
        shape = next(self._shapes)
        if self._with_indices and argument.name in _MAYBE_INDICES:
            shape = _Index(shape)
        takes_list = "List" in str(argument.type)
        if takes_list:
            return [self._tensor(shape), self._tensor(shape)]
        return self._tensor(shape)

    def _from_table(self, value: Any, argument: torch.Argument) -> Any:
        """Convert a value of a table to the type that the argument takes; a shape to a tensor.

        The tables have one value for a name, but overloads of an op take it in different types. So
        ``dim``, which is ``[0]`` in `_BY_NAME`, becomes

        - ``[0]`` for an argument of the type ``List[int]``,
        - ``0`` for ``int``,
        - the name of a dimension for ``str``.
        """
        type_name = str(argument.type)
        if isinstance(value, tuple):  # a shape
            return self._tensor(value)
        if type_name in ("str", "List[str]") and not isinstance(value, str):
            return dimension_by_name(type_name)
        if isinstance(value, list) and value:
            return self._from_list(value, argument)
        return value

    def _from_list(self, values: list[Any], argument: torch.Argument) -> Any:
        """Convert a list of a table, with at least one value, to the type of the argument."""
        type_name = str(argument.type)
        if type_name == "Tensor":  # a tensor of as many indices
            shape = _Index((len(values),))
            return self._tensor(shape)
        if "List" not in type_name:  # one value
            return values[0]
        if isinstance(values[0], tuple):  # shapes
            return [self._tensor(shape) for shape in values]
        # The schema may ask for N values: a padding has two for images, and one for sequences.
        length = argument.N or len(values)  # pyrefly: ignore[missing-attribute]: not in the stub
        return values[:length]

    def _tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of a shape, in the next dtype; of an `_Index` or `_Pivots` in integers."""
        if isinstance(shape, _Index):
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        if isinstance(shape, _Pivots):
            return torch.ones(shape, dtype=torch.int32, device=self._device)
        dtype = next(self._dtypes)
        self.float_dtypes.append(dtype)
        if len(shape) < 2:
            return torch.full(shape, 0.5, dtype=dtype, device=self._device)
        # Half the identity has an inverse, a Cholesky factor, and values in [0, 1].
        identity = torch.eye(*shape[-2:], dtype=dtype, device=self._device)
        half = identity / 2
        return half.expand(shape).contiguous()


def _values_of_op(op: OpOverload) -> dict[str, Any]:
    """The values of `_BY_OP` for this op, by the names of its arguments; else empty."""
    name = op._schema.name.removeprefix("aten::")
    return _BY_OP.get(name, {})


def _needs_shape(op: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument takes a tensor that is in no table, so that its shape has to be tried."""
    if str(argument.type) not in ("Tensor", "List[Tensor]"):
        return False
    return argument.name not in _BY_NAME and argument.name not in _values_of_op(op)
