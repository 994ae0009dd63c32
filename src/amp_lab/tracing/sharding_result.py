"""The result of `xray_sharding`: a table of dtypes, and advice.

A rule is a function that yields sentences on its findings, or no sentence. To add a rule, write the
function and add it to `RULES`. Its docstring describes the parameters, buffers or units that it
looks for.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp_lab.core.remedies import remedy
from amp_lab.core.report import Printed, Table, listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES

_SEPARATOR = ", "  # between the names of several modules that are one unit

_TWO_DTYPES = remedy(
    "sharding.two_dtypes",
    "a unit of FSDP2 has trained parameters of two dtypes",
    "{place} fails at the first step. FSDP2 needs one stored dtype for the trained parameters of "
    "a fully_shard call, but these have {dtypes}. Call fully_shard once for each dtype.",
    failure="AMP0181",
)
_IN_NO_UNIT = remedy(
    "sharding.in_no_unit",
    "a trained parameter is in no unit of FSDP2",
    "{names}: FSDP2 does not manage these parameters. Their gradients are not reduced, so the "
    "ranks diverge. Call fully_shard on the model itself, last.",
)
_NO_MASTER_WEIGHTS = remedy(
    "sharding.no_master_weights",
    "trained parameters are stored in 16 bits",
    "{names}: trained and stored in {dtype}, without fp32 master weights, so rounding removes "
    "small updates. Keep the model in fp32, and use {dtype} only in {to}.",
    failure="AMP0029",
)
_UPCAST = remedy(
    "sharding.upcast",
    "param_dtype is wider than the dtype in which the parameters are stored",
    "{names}: cast to {wide} from {stored}, which adds traffic but no precision. Store them in "
    "{wide}, or leave out param_dtype and give inputs in {stored}.",
)
_LOW_NORMS = remedy(
    "sharding.low_norms",
    "a policy computes norms in 16 bits",
    "{names}: norm weights, stored in fp32 but computed in {low}. To keep them in fp32, {keep}.",
)
_LOW_SUM_FSDP = remedy(
    "sharding.low_sum.fsdp",
    "FSDP2 sums gradients in 16 bits",
    "{names}: gradients are summed in {low}, which rounds at every rank. Use "
    "reduce_dtype=torch.float32 to sum them in fp32.",
)
_LOW_SUM_DDP = remedy(
    "sharding.low_sum.ddp",
    "DDP sums gradients in 16 bits",
    "{names}: gradients are summed in {low}, which rounds at every rank. Use fp32 weights without "
    "a communication hook to sum them in fp32.",
)
_BUFFERS = remedy(
    "sharding.buffers",
    "buffers in fp32 meet activations in 16 bits",
    "{names}: the policy casts only parameters and inputs, so these buffers stay in fp32. Mixed "
    "dtypes give fp32 or, in matmuls and convolutions, an error. Cast the buffers in forward, with "
    "buffer.to(x.dtype). If forward passes a buffer to another unit, this unit casts the buffer. "
    "To keep such a buffer in fp32, such as position angles, set cast_forward_inputs=False in the "
    "policy of that unit.",
    failure="AMP0193",
)
_INPUTS = remedy(
    "sharding.inputs_not_cast",
    "cast_forward_inputs is off",
    "Inputs {names} reach the {low} model in fp32, because cast_forward_inputs is off. Cast them "
    "in forward, except inputs that should stay in fp32.",
    failure="AMP0193",
)


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter, and its dtypes in a training step."""

    name: str
    unit: str | None  # the name of its `Unit`; None: it is in none
    # The dtypes in which it is …
    stored: torch.dtype  # … updated by the optimizer
    gathered: torch.dtype | None  # None: each rank has all of it, or torchao gathers it
    computed: torch.dtype  # … multiplied with activations
    reduced: torch.dtype | None  # of its gradient's sum; None: not summed, or by an unknown hook
    trained: bool
    elements: int
    of_norm: bool  # whether its module is a norm

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """All four dtypes, in the order of a step."""
        return self.stored, self.gathered, self.computed, self.reduced


class ShardedBuffer(NamedTuple):
    """A buffer, which neither FSDP2 nor DDP casts."""

    name: str
    unit: str | None  # the name of its `Unit`; None: it is in none
    dtype: torch.dtype
    of_norm: bool  # whether its module is a norm


@dataclass(frozen=True)
class Unit:
    """Modules that one call of `fully_shard` got; under DDP, the whole model."""

    name: str  # "": the model itself; of several modules, their names with ", " between them
    # The next four are those of its `MixedPrecisionPolicy`.
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    refusal: str | None = None  # what torch raises at the first step, if it does

    @property
    def inputs(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are cast to; None: they are not cast."""
        return self.param_dtype if self.cast_forward_inputs else None


class _RowCells(NamedTuple):
    """A row of the table, without the name of the unit."""

    parameters: str  # names of the parameters
    values: int  # numbers in them, all together
    dtypes: tuple[str, ...]  # stored, gathered, computed, reduced
    inputs: str


@dataclass(frozen=True, repr=False)
class ShardingXray(Printed):
    """The result of `xray_sharding`; `str` of it is a table to read."""

    model: str  # the name of its class
    kind: str  # FSDP2 or DDP
    units: list[Unit]  # in the model's order
    parameters: list[ShardedParameter]
    buffers: list[ShardedBuffer]
    inputs: dict[str, tuple[torch.dtype, torch.dtype]]  # as given, and as the model gets it
    hook: str | None = None  # the name of a user's function that sums the gradients for DDP
    advice: list[str] = field(init=False)

    def __post_init__(self) -> None:
        advice: list[str] = []
        for rule in RULES:
            advice += rule(self)
        object.__setattr__(self, "advice", advice)

    @property
    def is_fsdp(self) -> bool:
        """Whether the model is sharded by FSDP2; else it is in DDP."""
        return self.kind == "FSDP2"

    def unit(self, name: str | None) -> Unit | None:
        """The unit with this name; None if there is no such unit."""
        return next((unit for unit in self.units if unit.name == name), None)

    def parameters_in(self, unit: str | None) -> list[ShardedParameter]:
        """The parameters in the unit with this name; for None, the parameters in no unit."""
        return [p for p in self.parameters if p.unit == unit]

    def _table(self) -> Table:
        return Table(
            ["unit", "parameters", "values", "stored", "gathered", "computed", "reduced", "inputs"],
            list(self._rows()),
            caption=f"{self.model} under {self.kind}, before the first step",
            facts=list(self._facts()),
            advice=self.advice,
            right=(2,),
        )

    def _rows(self) -> Iterator[list[str]]:
        """The table's rows: one for each unit and combination of dtypes.

        Units whose names differ only in numbers, such as ``blocks.0`` and ``blocks.1``, share their
        rows if these are equal. The last rows are those of parameters in no unit.
        """
        unit_names = [*[unit.name for unit in self.units], None]
        # Units that share their rows, by their common name and these rows.
        alike_units: dict[tuple, list[str | None]] = {}
        for name in unit_names:
            pattern = None if name is None else _without_numbers(name)
            key = (pattern, tuple(self._rows_of_unit(name)))
            alike_units.setdefault(key, []).append(name)
        for (_, rows), names in alike_units.items():
            label = _label(names)
            for row in rows:
                values = len(names) * row.values
                yield [label, row.parameters, f"{values:,}", *row.dtypes, row.inputs]
                label = ""  # only the first row of a unit shows its name

    def _rows_of_unit(self, name: str | None) -> list[_RowCells]:
        """The rows of the unit with this name: one for each combination of dtypes.

        For None, those of the parameters in no unit.
        """
        unit = self.unit(name)
        inputs = "not cast"
        if unit is not None and unit.inputs is not None:
            inputs = short_name(unit.inputs)
        # By the four dtypes, and whether they are trained.
        groups: dict[tuple, list[ShardedParameter]] = {}
        for parameter in self.parameters_in(name):
            groups.setdefault((parameter.dtypes, parameter.trained), []).append(parameter)
        if unit is not None and not groups:
            return [_RowCells("no parameters", 0, ("-", "-", "-", "-"), inputs)]
        prefix = _common_prefix(name or "")  # left out of the parameters' names
        rows = []
        for (dtypes, trained), members in groups.items():
            local_names = [parameter.name.removeprefix(prefix) for parameter in members]
            values = sum(parameter.elements for parameter in members)
            stored, gathered, computed, reduced = map(short_name, dtypes)
            if not trained:
                reduced = "frozen"
            dtype_cells = (stored, gathered, computed, reduced)
            rows.append(_RowCells(listed(local_names, 2), values, dtype_cells, inputs))
        return rows

    def _facts(self) -> Iterator[str]:
        """Sentences on inputs, buffers, output and hook, as far as there are any."""
        inputs = [_input_text(name, *dtypes) for name, dtypes in self.inputs.items()]
        if inputs:
            yield f"Inputs: {listed(inputs, 6)}."
        counts = Counter(short_name(buffer.dtype) for buffer in self.buffers)
        if counts:
            buffers = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.items())
            yield f"Buffers, which are not cast: {buffers}."
        root = self.unit("")
        if root is not None and root.output_dtype is not None:
            yield f"Output: cast to {short_name(root.output_dtype)}."
        if self.hook is not None:
            yield (
                f"The hook {self.hook!r} sums the gradients, in a dtype that only a real step "
                "shows."
            )


def _input_text(name: str, dtype: torch.dtype, cast_dtype: torch.dtype) -> str:
    """``argument 0 fp32 → bf16``: an input with its dtype, and the one that it is cast to."""
    label = f"argument {name}" if name.isdigit() else name
    if dtype is cast_dtype:
        return f"{label} {short_name(dtype)}"
    return f"{label} {short_name(dtype)} → {short_name(cast_dtype)}"


def _label(names: list[str | None]) -> str:
    """The text in the table for units that share their rows.

    It is ``layer1`` for one unit, ``blocks.*, 12 units`` for several, ``the model`` for the name ""
    and ``no unit`` for None. `names` are the names of the units.
    """
    first = names[0]
    if first is None:
        label = "no unit"
    elif first == "":
        label = "the model"
    else:
        label = first
    if len(names) == 1:
        return label
    return f"{_without_numbers(label)}, {len(names)} units"


def _without_numbers(name: str) -> str:
    """A unit's name with ``*`` for numbers: ``blocks.*.norm`` for ``blocks.3.norm``."""
    return re.sub(r"\b\d+\b", "*", name)


def _common_prefix(unit: str) -> str:
    """The module that contains all modules of a unit, as a prefix of parameters' names.

    ``blocks.3.`` for the unit ``blocks.3.a, blocks.3.b``; ``head.`` for the unit ``head``.
    """
    # `commonpath` compares whole parts of paths, so the dots become slashes for it.
    paths = unit.replace(".", "/").split(_SEPARATOR)
    common_path = posixpath.commonpath(paths)
    return common_path.replace("/", ".") + "."


def _refused_units(xray: ShardingXray) -> Iterator[str]:
    """Units of FSDP2 that fail at the first step, mostly because of parameters of two dtypes."""
    for unit in xray.units:
        if unit.refusal is None:
            continue
        place = f"Unit {unit.name!r}" if unit.name else "The model's own unit"
        trained = [p for p in xray.parameters_in(unit.name) if p.trained]
        names_by_dtype = _names_by_dtype(trained, "stored")
        if len(names_by_dtype) > 1:
            dtypes = [f"{dtype} ({names})" for dtype, names in names_by_dtype.items()]
            yield _TWO_DTYPES.sentence(place=place, dtypes=" and ".join(dtypes))
        else:
            yield f"{place} fails at the first step: {unit.refusal}."


def _trained_in_no_unit(xray: ShardingXray) -> Iterator[str]:
    """Trained parameters that are in no unit of FSDP2."""
    trained = [p for p in xray.parameters_in(None) if p.trained]
    if trained and xray.is_fsdp:
        yield _IN_NO_UNIT.sentence(names=_names(trained))


def _no_master_weights(xray: ShardingXray) -> Iterator[str]:
    """Trained parameters in 16 bits, a sentence for each dtype."""
    low = [p for p in xray.parameters if p.trained and p.stored in LOWER_DTYPES]
    cast_by = "param_dtype" if xray.is_fsdp else "autocast"
    for dtype, names in _names_by_dtype(low, "stored").items():
        yield _NO_MASTER_WEIGHTS.sentence(names=names, dtype=dtype, to=cast_by)


def _upcasts(xray: ShardingXray) -> Iterator[str]:
    """Parameters that are computed in a wider dtype than they are stored in."""
    wider = [p for p in xray.parameters if p.computed.itemsize > p.stored.itemsize]
    for dtype, names in _names_by_dtype(wider, "computed").items():
        stored = short_name(wider[0].stored)  # of the first alone: mostly all have the same
        yield _UPCAST.sentence(names=names, wide=dtype, stored=stored)


def _norms_in_low_precision(xray: ShardingXray) -> Iterator[str]:
    """Weights of norms that FSDP2 casts to 16 bits."""
    if not xray.is_fsdp:
        return
    norms = [p for p in xray.parameters if p.of_norm and p.stored is torch.float32]
    low = [p for p in norms if p.computed in LOWER_DTYPES]
    for dtype, names in _names_by_dtype(low, "computed").items():
        yield _LOW_NORMS.sentence(names=names, low=dtype, keep=_keep_in_fp32())


def _keep_in_fp32() -> str:
    """How to keep parameters in fp32, with what this version of torch has."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to load

    policy = "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    own_unit = f"call fully_shard on these modules separately, with {policy}"
    if not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        return own_unit
    return f"name them in param_dtype_override_fn, or {own_unit}"


def _summed_in_low_precision(xray: ShardingXray) -> Iterator[str]:
    """Parameters whose gradients are summed in 16 bits, by that dtype."""
    cure = _LOW_SUM_FSDP if xray.is_fsdp else _LOW_SUM_DDP
    low = [p for p in xray.parameters if p.reduced in LOWER_DTYPES]
    for dtype, names in _names_by_dtype(low, "reduced").items():
        yield cure.sentence(names=names, low=dtype)


def _buffers_in_fp32(xray: ShardingXray) -> Iterator[str]:
    """Buffers in fp32 in a unit whose parameters, and so activations, are in 16 bits."""
    low_units = {unit.name for unit in xray.units if unit.param_dtype in LOWER_DTYPES}
    in_low_units = [buffer for buffer in xray.buffers if buffer.unit in low_units]
    wide = [b for b in in_low_units if b.dtype is torch.float32 and not b.of_norm]
    if wide:
        yield _BUFFERS.sentence(names=_names(wide))


def _inputs_not_cast(xray: ShardingXray) -> Iterator[str]:
    """Inputs that reach a model in 16 bits in fp32, since its policy does not cast them."""
    root = xray.unit("")  # it gets the inputs
    if root is None or root.cast_forward_inputs or root.param_dtype not in LOWER_DTYPES:
        return
    wide = [name for name, (_, arrives) in xray.inputs.items() if arrives is torch.float32]
    if wide:
        yield _INPUTS.sentence(names=listed(wide, 3), low=short_name(root.param_dtype))


# The advice is in this order, the most serious first.
RULES: tuple[Callable[[ShardingXray], Iterator[str]], ...] = (
    _refused_units,
    _trained_in_no_unit,
    _no_master_weights,
    _upcasts,
    _norms_in_low_precision,
    _summed_in_low_precision,
    _buffers_in_fp32,
    _inputs_not_cast,
)


def _names_by_dtype(parameters: list[ShardedParameter], attribute: str) -> dict[str, str]:
    """The names of parameters, grouped by their dtype, as ``{"bf16": "a.weight, b.weight"}``.

    `attribute` is the name of a dtype of `ShardedParameter`, such as "stored".
    """
    groups: dict[str, list[ShardedParameter]] = {}
    for parameter in parameters:
        dtype = short_name(getattr(parameter, attribute))
        groups.setdefault(dtype, []).append(parameter)
    return {dtype: _names(members) for dtype, members in groups.items()}


def _names(tensors: Iterable[ShardedParameter | ShardedBuffer]) -> str:
    """The names of the first three tensors, and how many more there are."""
    return listed([tensor.name for tensor in tensors], 3)
