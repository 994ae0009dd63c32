"""The op table of autocast: which policy each op has on a backend, and what a call returns.

No policy is written here. The dispatcher says which ops autocast knows on a backend. What it does
to one is read from a call that is caught between autocast's kernel for the op and the op itself.
"""

import dataclasses
import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.errors import AmpLabWarning, first_line
from amp_lab.report import Printed, Table, dtype_name, short_name
from amp_lab.tracing.fake_device import (
    absent_device,
    autocast_on,
    checked_dtype,
    errors_not_logged,
    fake_mode,
)

POLICIES = {
    "lower_precision": "casts floating-point inputs to autocast's dtype",
    "fp32": "casts floating-point inputs to float32",
    "fp32_set_opt_dtype": "computes and returns float32, unless the call names a dtype",
    "promote": "casts floating-point inputs to the widest dtype among them",
    "banned": "raises",
}
"""What autocast does to an op, by the name of the policy."""


@dataclass(frozen=True)
class OpRule:
    """What autocast on one backend does to one of torch's ops."""

    op: str
    """Its name without ``aten::``, and with the overload where its overloads differ."""
    overloads: tuple[str, ...]
    """Those of its overloads that this rule is for; the one without a name is ``default``."""
    policy: str
    """One of `POLICIES`."""
    given: tuple[torch.dtype, ...]
    """The dtypes of the floating-point inputs of a call, such that the policy has work to do."""
    observed: torch.dtype | None
    """The dtype that the call returned; None if the op could not be called."""
    reason: str
    """Why it could not be called, in a line; else empty."""
    agrees: bool | None
    """Whether `observed` is what the policy promises; None if no floating-point number came back.

    A complex number is held to the promise by its parts.
    """


class OpTable(Printed, list[OpRule]):
    """The rules of one backend; made by `op_table`."""

    def __init__(self, rules: Iterable[OpRule], device_type: str, dtype: torch.dtype, real: bool):
        super().__init__(rules)
        self.device_type, self.dtype = device_type, dtype
        self.real = real
        """Whether the ops were called on the device itself; else on fake tensors of its type."""

    def to_json(self) -> str:
        """The table as JSON, with dtypes by their names."""
        rules = [
            {
                "op": rule.op,
                "overloads": list(rule.overloads),
                "policy": rule.policy,
                "given": [dtype_name(dtype) for dtype in rule.given],
                "observed": rule.observed and dtype_name(rule.observed),
                "reason": rule.reason,
                "agrees": rule.agrees,
            }
            for rule in self
        ]
        about = {
            "torch": torch.__version__,
            "device_type": self.device_type,
            "dtype": dtype_name(self.dtype),
            "real": self.real,
        }
        return json.dumps(about | {"ops": rules}, indent=2)

    def _table(self) -> Table:
        rows = [
            [
                rule.policy,
                rule.op,
                ", ".join(dict.fromkeys(map(short_name, rule.given))),
                short_name(rule.observed) if rule.observed else "-",
                rule.reason or ("not what the policy says" if rule.agrees is False else ""),
            ]
            for rule in self
        ]
        return Table(
            ["policy", "op", "given", "returned", "note"],
            rows,
            caption=self._summary(),
            facts=[f"{policy}: {meaning}" for policy, meaning in POLICIES.items()],
        )

    def _summary(self) -> str:
        count = Counter(rule.policy for rule in self)
        parts = ", ".join(f"{count[policy]} {policy}" for policy in POLICIES if count[policy])
        where = "the device" if self.real else "fake tensors"
        return (
            f"autocast on {self.device_type!r} to {short_name(self.dtype)}, "
            f"torch {torch.__version__}: {len(self)} ops ({parts}), called on {where}"
        )


class OpDifference(NamedTuple):
    """An op that autocast treats differently on two backends."""

    op: str
    """Its name, with the overload unless that is ``default``."""
    first: str | None
    """The policy in the first table; None where autocast leaves the op alone."""
    second: str | None


class OpDifferences(Printed, list[OpDifference]):
    """The ops that have different policies in two tables; made by `differences`."""

    def __init__(self, rows: Iterable[OpDifference], names: tuple[str, str]):
        super().__init__(rows)
        self.names = names

    def to_json(self) -> str:
        """The table as JSON, with dtypes by their names."""
        rows = [{"op": row.op, "policies": [row.first, row.second]} for row in self]
        return json.dumps({"device_types": list(self.names), "ops": rows}, indent=2)

    def _table(self) -> Table:
        rows = [[row.op, row.first or "-", row.second or "-"] for row in self]
        return Table(["op", *self.names], rows, caption=self._summary())

    def _summary(self) -> str:
        return (
            f"{len(self)} ops are treated differently by autocast on {self.names[0]!r} and on "
            f"{self.names[1]!r}; '-': autocast leaves it alone"
        )


def op_table(device_type: str, dtype: torch.dtype | None = None) -> OpTable:
    """What autocast on a backend does to each of torch's ops that it knows, by policy and name.

    `dtype` is what autocast lowers to, the backend's default for None. The policies are those of
    this torch (see `POLICIES`), each checked by a call of the op: on the device if it is here, else
    on fake tensors of that type. An op that is in no table of its backend runs in the dtype of its
    inputs, or is made of ops that are.

    Raises `DeviceError` for an unknown device type and `DeviceError` for a dtype that autocast does
    not take. Warns of an op that follows no policy, and leaves it out.
    """
    dtype = checked_dtype(device_type, dtype)
    real = device_type == "cpu" or torch.get_device_module(device_type).is_available()
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}")
    rules: dict[str, list[OpRule]] = {}
    for name in sorted(names):
        namespace, _, qualified = name.partition("::")
        if namespace != "aten":  # an extension's, such as torchvision's, and only once imported
            continue
        base, _, overload = qualified.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        policy, reason = _policy(op, device_type, dtype)
        if policy is None:
            message = (
                f"{name} is left out: autocast on {device_type!r} follows no policy ({reason})"
            )
            warnings.warn(message, AmpLabWarning, stacklevel=2)
            continue
        rules.setdefault(base, []).append(_rule(op, policy, reason, device_type, dtype, real))
    table = itertools.chain.from_iterable(_merged(base, group) for base, group in rules.items())
    order = list(POLICIES)
    by_policy = sorted(table, key=lambda rule: (order.index(rule.policy), rule.op))
    return OpTable(by_policy, device_type, dtype, real)


def differences(first: OpTable, second: OpTable) -> OpDifferences:
    """The ops that autocast treats differently on two backends, by name.

    Overloads are told apart, since one backend may know an overload that another does not.
    """
    policies = [
        {
            f"{rule.op.partition('.')[0]}.{overload}": rule.policy
            for rule in table
            for overload in rule.overloads
        }
        for table in (first, second)
    ]
    names = sorted(set(policies[0]) | set(policies[1]))
    rows = (
        OpDifference(name.removesuffix(".default"), *(table.get(name) for table in policies))
        for name in names
    )
    return OpDifferences(
        (row for row in rows if row.first != row.second), (first.device_type, second.device_type)
    )


# --- The policy: what autocast's kernel makes of its inputs.


class _CaughtError(Exception):
    """The call has arrived at the op itself."""


class _Catch(TorchDispatchMode):
    """Catches a call of one op below autocast, whatever its overload, before the op runs.

    In inference mode torch does not take an op apart before this mode has seen it.
    """

    def __init__(self, op: OpOverload):
        super().__init__()
        self._name = op._schema.name
        self.arguments: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == self._name:
            self.arguments = pytree.tree_leaves((args, kwargs))
            raise _CaughtError
        return func(*args, **kwargs)  # a cast


def _policy(op: OpOverload, device_type: str, dtype: torch.dtype) -> tuple[str | None, str]:
    """The name of the policy, and for a banned op what torch says; None, and why, for no policy."""
    reasons = []
    # The kernel of cuDNN's recurrent networks knows float16 alone: CUDA's default.
    for asked in dict.fromkeys((dtype, torch.get_autocast_dtype(device_type))):
        low, reason = _arriving(op, device_type, asked, first=asked)
        mixed, _ = _arriving(op, device_type, asked, first=torch.float32)
        if low is not None and mixed is not None:
            return _policy_of(low, mixed, asked), "it changes no dtype"
        reasons.append(reason)
    # A kernel may raise for other reasons; the one of a banned op says that it is for autocast.
    return "banned" if "autocast" in reasons[0] else None, reasons[0]


def _policy_of(low: list[Any], mixed: list[Any], dtype: torch.dtype) -> str | None:
    """The policy by what came through of inputs all low, and with the first one in float32."""
    (low_inputs, named), (mixed_inputs, _) = map(_dtypes, (low, mixed))
    if named == [torch.float32]:  # set, or appended by a change to an overload that takes one
        return "fp32_set_opt_dtype"
    if set(mixed_inputs) == {dtype}:
        return "lower_precision"
    if set(mixed_inputs) != {torch.float32}:
        return None
    if set(low_inputs) == {torch.float32}:
        return "fp32"
    return "promote" if len(mixed_inputs) > 1 else None


def _dtypes(arguments: list[Any]) -> tuple[list[torch.dtype], list[torch.dtype]]:
    """The dtypes of the floating-point tensors, and those that are arguments themselves."""
    tensors = [a.dtype for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return tensors, [a for a in arguments if isinstance(a, torch.dtype)]


def _arriving(
    op: OpOverload, device_type: str, dtype: torch.dtype, first: torch.dtype
) -> tuple[list[Any] | None, str]:
    """The arguments with which the op is called below autocast; None, and the error, if it is not.

    The first floating-point input has the dtype `first`, the others have autocast's. The shapes do
    not matter: the op never runs.
    """
    catch = _Catch(op)
    with _fake(device_type), torch.inference_mode(), autocast_on(device_type, dtype):
        make = _Make(device_type, first, dtype)
        args, kwargs = _arguments(op, make, itertools.repeat((2, 2)), indices=False)
        try:
            with catch:
                op(*args, **kwargs)
        except _CaughtError:
            return catch.arguments, ""
        except RuntimeError as error:
            return None, _told(error)
    return None, "its kernel does not call it"


# --- The check: a call with inputs that the op takes.

_N = 4  # the size of every dimension, unless the op needs another


class _Shape(tuple):
    """The shape of a floating-point tensor."""


class _Index(tuple):
    """The shape of a tensor of indices, which are all 0."""


class _Pivots(tuple):
    """The shape of a tensor of LAPACK's indices, which start at 1."""


# What the name of an argument says about its value. Other numbers are 1, and truth values False.
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

# Arguments of ops that do not take tensors of equal sizes. All else is found by trying.
_IMAGE, _VOLUME = (_N,) * 4, (_N,) * 5
_CONVOLUTION = {"input": _Shape(_IMAGE), "self": _Shape(_IMAGE), "weight": _Shape(_IMAGE)}
_BY_OP: dict[str, dict[str, Any]] = {
    "_convolution": _CONVOLUTION,
    "_cudnn_rnn": {
        "input": _Shape((_N, _N, _N)),
        "weight": [
            _Shape((4 * _N, _N)), _Shape((4 * _N, _N)), _Shape((4 * _N,)), _Shape((4 * _N,))
        ],
        "weight_stride0": 4,
        "hx": _Shape((1, _N, _N)),
        "cx": _Shape((1, _N, _N)),
        "mode": 2,
        "hidden_size": _N,
        "proj_size": 0,
        "batch_sizes": [],
    },
    "_grid_sampler_2d_cpu_fallback": {"input": _Shape(_IMAGE), "grid": _Shape((_N, _N, _N, 2))},
    "_native_multi_head_attention": {
        "query": _Shape((_N, _N, _N)),
        "key": _Shape((_N, _N, _N)),
        "value": _Shape((_N, _N, _N)),
        "embed_dim": _N,
        "qkv_weight": _Shape((3 * _N, _N)),
        "qkv_bias": _Shape((3 * _N,)),
        "proj_weight": _Shape((_N, _N)),
        "proj_bias": _Shape((_N,)),
    },
    "_scaled_dot_product_flash_attention": dict.fromkeys(
        ("query", "key", "value"), _Shape((1, 1, 8, 8))
    ),
    "_thnn_fused_gru_cell": {
        "input_gates": _Shape((_N, 3 * _N)), "hidden_gates": _Shape((_N, 3 * _N))
    },
    "_thnn_fused_lstm_cell": {
        "input_gates": _Shape((_N, 4 * _N)), "hidden_gates": _Shape((_N, 4 * _N))
    },
    "_mps_convolution": _CONVOLUTION,
    "convolution": _CONVOLUTION,
    "cudnn_convolution": _CONVOLUTION,
    "cudnn_convolution_transpose": _CONVOLUTION,
    "cross": dict.fromkeys(("self", "other"), _Shape((_N, 3))),
    "ctc_loss": {
        "targets": _Index((_N, _N)), "input_lengths": [_N] * _N, "target_lengths": [0] * _N
    },
    "fractional_max_pool2d": {"self": _Shape(_IMAGE), "random_samples": _Shape((_N, _N, 2))},
    "fractional_max_pool3d": {"self": _Shape(_VOLUME), "random_samples": _Shape((_N, _N, 3))},
    "grid_sampler": {"input": _Shape(_IMAGE), "grid": _Shape((_N, _N, _N, 2))},
    "grid_sampler_2d": {"input": _Shape(_IMAGE), "grid": _Shape((_N, _N, _N, 2))},
    "grid_sampler_3d": {"input": _Shape(_VOLUME), "grid": _Shape((_N, _N, _N, _N, 3))},
    "index_copy": {"index": _Index((_N,))},
    "gru_cell": {"w_ih": _Shape((3 * _N, _N)), "w_hh": _Shape((3 * _N, _N))},
    "lstm_cell": {"w_ih": _Shape((4 * _N, _N)), "w_hh": _Shape((4 * _N, _N))},
    "lu_solve": {"LU_pivots": _Pivots((_N,))},
    "max_unpool2d": {"indices": _Index(_IMAGE), "output_size": [_N, _N]},
    "max_unpool3d": {
        "indices": _Index(_VOLUME), "output_size": [_N] * 3, "padding": [0, 0, 0]
    },
    "mkldnn_rnn_layer": {
        "input": _Shape((_N, _N, _N)),
        "weight0": _Shape((4 * _N, _N)),
        "weight1": _Shape((4 * _N, _N)),
        "weight2": _Shape((4 * _N,)),
        "weight3": _Shape((4 * _N,)),
        "hx_": _Shape((_N, _N)),
        "cx_": _Shape((_N, _N)),
        "batch_sizes": [],
        "mode": 2,
        "hidden_size": _N,
        "has_biases": True,
    },
    "nll_loss2d": {"self": _Shape(_IMAGE), "target": _Index((_N, _N, _N))},
    "linalg_tensorinv": {"ind": 1},
    "stft": {"window": _Shape((_N,)), "return_complex": True},
    "view_as_complex": {"self": _Shape((_N, 2))},
}  # fmt: skip

# Tensors that some ops take as floating-point numbers, and others as indices.
_MAYBE_INDICES = ("index", "target", "targets")


def _rule(
    op: OpOverload, policy: str, reason: str, device_type: str, dtype: torch.dtype, real: bool
) -> OpRule:
    """The rule of one overload, with what a call returned."""
    first, rest = {
        "lower_precision": (torch.float32, torch.float32),
        "promote": (dtype, torch.float32),
    }.get(policy, (dtype, dtype))
    observed, given = None, ()
    if policy != "banned":
        make = _Make(device_type, first, rest)
        observed, given, reason = _observe(op, make, device_type, dtype, real)
    agrees = None
    if observed is not None and (observed.is_floating_point or observed.is_complex):
        promised = dtype if policy == "lower_precision" else torch.float32
        agrees = observed in (promised, promised.to_complex())
    base, overload = op._schema.name.removeprefix("aten::"), op._overloadname
    return OpRule(base, (overload,), policy, given, observed, reason, agrees)


def _observe(
    op: OpOverload, make: "_Make", device_type: str, dtype: torch.dtype, real: bool
) -> tuple[torch.dtype | None, tuple[torch.dtype, ...], str]:
    """What a call returned, what it was given, and why there is none."""
    fitting, reason = _fitting(op)
    tries = [fitting] if fitting else list(_shapes(op)) if real else []
    for shapes, indices in tries:
        try:
            with warnings.catch_warnings(), nullcontext() if real else _fake(device_type):
                warnings.simplefilter("ignore")  # that an op is deprecated: the user called none
                args, kwargs = _arguments(op, make.afresh(), iter(shapes), indices)
                with torch.no_grad(), autocast_on(device_type, dtype):
                    result = op(*args, **kwargs)
        except Exception as error:  # kernels, and their fakes in Python, raise whatever they like
            reason = _told(error)
            continue
        dtypes = [x.dtype for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        return (floating or dtypes)[0], tuple(make.given), ""
    return None, (), reason


@functools.cache
def _fitting(op: OpOverload) -> tuple["_Sizes | None", str]:
    """Shapes that the op takes, tried on tensors without values; None, and why not, if none fit."""
    make, reasons = _Make("meta", torch.float32, torch.float32), []
    for sizes in _shapes(op):
        args, kwargs = _arguments(op, make.afresh(), iter(sizes.shapes), sizes.indices)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                op(*args, **kwargs)
        except Exception as error:
            reasons.append(_told(error))
            if isinstance(error, NotImplementedError):
                break
        else:
            return sizes, ""
    return None, reasons[-1]


def _told(error: Exception) -> str:
    """What an error says, in a line."""
    if isinstance(error, (NotImplementedError, UnsupportedOperatorException)):
        return "torch has no kernel for it here, and none for fake tensors"
    return first_line(error)


@contextmanager
def _fake(device_type: str) -> Iterator[None]:
    with absent_device(device_type), fake_mode(), errors_not_logged():
        yield


class _Make:
    """Makes the tensors of a call, and notes the dtypes of those in floating point."""

    def __init__(self, device_type: str, first: torch.dtype, rest: torch.dtype):
        self._device, self._first, self._rest = torch.device(device_type), first, rest
        self.given: list[torch.dtype] = []

    def afresh(self) -> "_Make":
        self.given = []
        return self

    def tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Half the identity, which has an inverse, a Cholesky factor, and values in [0, 1]."""
        if isinstance(shape, _Index):
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        if isinstance(shape, _Pivots):
            return torch.ones(shape, dtype=torch.int32, device=self._device)
        dtype = self._rest if self.given else self._first
        self.given.append(dtype)
        if len(shape) < 2:
            return torch.full(shape, 0.5, dtype=dtype, device=self._device)
        matrix = torch.eye(*shape[-2:], dtype=dtype, device=self._device) / 2
        return matrix.expand(shape).contiguous()


class _Sizes(NamedTuple):
    shapes: list[tuple[int, ...]]
    """Of the tensors of an op that have no value by name."""
    indices: bool
    """Whether those that may be indices are."""


def _shapes(op: OpOverload) -> Iterator[_Sizes]:
    """What to try.

    First all of them with as many dimensions, then each with its own.
    """
    free = [a.name for a in op._schema.arguments if _is_free(op, a)]
    dims = itertools.product((2, 1, 3, 4, 5), repeat=min(len(free), 3))
    ordered = sorted(dims, key=lambda dims: len(set(dims)))
    for indices in (False, True) if set(free) & set(_MAYBE_INDICES) else (False,):
        for dims in ordered:
            last = dims[-1:] * (len(free) - len(dims))
            yield _Sizes([(_N,) * d for d in (*dims, *last)], indices)


def _by_op(op: OpOverload) -> dict[str, Any]:
    return _BY_OP.get(op._schema.name.removeprefix("aten::"), {})


def _is_free(op: OpOverload, argument: torch.Argument) -> bool:
    required = str(argument.type) in ("Tensor", "List[Tensor]")
    return required and argument.name not in (_by_op(op) | _BY_NAME)


def _arguments(
    op: OpOverload, make: _Make, shapes: Iterator[tuple[int, ...]], indices: bool
) -> tuple[list[Any], dict[str, Any]]:
    """A value for every argument of an op, by its name and type."""
    by_op = _by_op(op)
    args, kwargs = [], {}
    for argument in op._schema.arguments:
        if argument.name in by_op:
            value = _named(by_op[argument.name], argument, make)
        elif argument.has_default_value():
            value = argument.default_value
        elif argument.name in _BY_NAME:
            value = _named(_BY_NAME[argument.name], argument, make)
        elif _is_free(op, argument):
            shape = next(shapes)
            as_index = indices and argument.name in _MAYBE_INDICES
            value = make.tensor(_Index(shape) if as_index else shape)
            if str(argument.type) == "List[Tensor]":
                value = [value, make.tensor(shape)]
        else:
            value = _plain(argument)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _named(value: Any, argument: torch.Argument, make: _Make) -> Any:
    """The value that a name stands for: a tensor of a shape, or a list, or its first element."""
    kind = str(argument.type)
    if isinstance(value, tuple):
        return make.tensor(value)
    if kind in ("str", "List[str]") and not isinstance(value, str):
        # A dimension by name, which torch 2.11 still has; its dispatcher wants this prefix.
        return "dimname::x" if kind == "str" else ["dimname::x"]
    if not isinstance(value, list) or not value:
        return value
    if "List" in kind and isinstance(value[0], tuple):
        return [make.tensor(shape) for shape in value]
    if "List" in kind:
        return value[: argument.N or len(value)]
    return make.tensor(_Index((len(value),))) if kind == "Tensor" else value[0]


def _plain(argument: torch.Argument) -> Any:
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [1] * (argument.N or 2)
    return {"bool": False, "str": "nuc"}.get(kind, 1)


def _merged(base: str, rules: list[OpRule]) -> Iterable[OpRule]:
    """One rule for all overloads of an op, if they do not differ."""
    called = [rule for rule in rules if rule.observed is not None] or rules
    if len({rule.policy for rule in rules}) == len({rule.observed for rule in called}) == 1:
        overloads = tuple(rule.overloads[0] for rule in rules)
        return [dataclasses.replace(called[0], overloads=overloads)]
    return [dataclasses.replace(rule, op=f"{base}.{rule.overloads[0]}") for rule in rules]
