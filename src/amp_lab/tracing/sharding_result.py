"""The result of `xray_sharding`, as text, Markdown, HTML and JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp_lab.core.report import Printed, Table, listed, short_name
from amp_lab.tracing.sharding_advice import RULES

_SEPARATOR = ", "  # between the names of several modules that are one unit


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter, and the dtypes that it goes through in a training step."""

    name: str
    unit: str | None  # the name of its unit; None: it is in none
    stored: torch.dtype  # in which the optimizer updates it
    gathered: torch.dtype | None  # None: each rank has all of it, or torchao gathers it
    computed: torch.dtype  # in which it is multiplied with activations
    reduced: torch.dtype | None  # of its gradient's sum; None: not summed, or by an unknown hook
    trained: bool
    elements: int
    of_norm: bool

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """All four dtypes, in the order of a step."""
        return self.stored, self.gathered, self.computed, self.reduced


class ShardedBuffer(NamedTuple):
    """A buffer, which neither FSDP2 nor DDP casts."""

    name: str
    unit: str | None
    dtype: torch.dtype
    of_norm: bool


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together; under DDP, the whole model."""

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

    def parameters_in(self, unit: str | None) -> list[ShardedParameter]:
        """The parameters in the unit of this name; for None, those that are in no unit."""
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

        Units that are alike, such as numbered blocks, share their rows.
        """
        for names in self._groups_of_alike_units():
            label = _label(names)
            # The rows of the first unit stand for all, whose rows are equal.
            for parameters, values, *cells in self._rows_of_unit(names[0]):
                total = len(names) * int(values)
                yield [label, parameters, f"{total:,}", *cells]
                label = ""  # for the other rows of the unit

    def _groups_of_alike_units(self) -> Iterable[list[str | None]]:
        """Lists of names of units: in one list are units whose names differ only in numbers.

        Their rows are equal too. The last name is None, for parameters that are in no unit.
        """
        groups: dict[tuple[str | None, str], list[str | None]] = {}
        for name in [*[unit.name for unit in self.units], None]:
            rows = self._rows_of_unit(name)
            if rows:
                pattern = None if name is None else _without_numbers(name)
                groups.setdefault((pattern, str(rows)), []).append(name)
        return groups.values()

    def _rows_of_unit(self, name: str | None) -> list[list[str]]:
        """The rows of a unit without the first cell, its name; one for each combination of dtypes.

        The number of values has no separators yet: `_rows` multiplies it by the number of units. No
        rows for `name` None if all parameters are in units.
        """
        # By the four dtypes, and whether they are trained.
        groups: dict[tuple, list[ShardedParameter]] = {}
        for parameter in self.parameters_in(name):
            groups.setdefault((parameter.dtypes, parameter.trained), []).append(parameter)
        unit = unit_named(name, self.units)
        inputs = "as they come"
        if unit is not None and unit.inputs is not None:
            inputs = short_name(unit.inputs)
        if unit is not None and not groups:
            return [["none of its own", "0", "-", "-", "-", "-", inputs]]
        prefix = _common_prefix(name or "")  # left out of the parameters' names
        rows = []
        for (dtypes, trained), members in groups.items():
            local_names = [parameter.name[len(prefix) :] for parameter in members]
            values = sum(parameter.elements for parameter in members)
            stored, gathered, computed, reduced = map(short_name, dtypes)
            if not trained:
                reduced = "frozen"
            dtype_cells = [stored, gathered, computed, reduced]
            rows.append([listed(local_names, 2), str(values), *dtype_cells, inputs])
        return rows

    def _facts(self) -> Iterator[str]:
        """Sentences on inputs, buffers, output and hook, as far as there are any."""
        inputs = [_input_text(name, *dtypes) for name, dtypes in self.inputs.items()]
        if inputs:
            yield f"Inputs: {listed(inputs, 6)}."
        counts = Counter(short_name(buffer.dtype) for buffer in self.buffers)
        if counts:
            buffers = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.items())
            yield f"Buffers, which stay as they are: {buffers}."
        root = unit_named("", self.units)
        if root is not None and root.output_dtype is not None:
            yield f"Output: cast to {short_name(root.output_dtype)}."
        if self.hook is not None:
            yield f"Gradients are summed by {self.hook!r}, in a dtype that only a step shows."


def unit_named(name: str | None, units: Iterable[Unit]) -> Unit | None:
    """The unit of this name; None if there is none."""
    for unit in units:
        if unit.name == name:
            return unit
    return None


def _input_text(name: str, dtype: torch.dtype, cast_dtype: torch.dtype) -> str:
    """``argument 0 fp32 → bf16``: an input with its dtype, and the one that it is cast to."""
    label = f"argument {name}" if name.isdigit() else name
    if dtype is cast_dtype:
        return f"{label} {short_name(dtype)}"
    return f"{label} {short_name(dtype)} → {short_name(cast_dtype)}"


def _label(names: list[str | None]) -> str:
    """The first cell of alike units: ``layer1``, ``blocks.*, 12 units``, ``the model``.

    `names` are theirs; None, for parameters in no unit, gives ``no unit``.
    """
    first = names[0]
    label = first or "the model"
    if first is None:
        label = "no unit"
    if len(names) == 1:
        return label
    return f"{_without_numbers(label)}, {len(names)} units"


def _without_numbers(name: str) -> str:
    """A unit's name with ``*`` for numbers: ``blocks.*.norm`` for ``blocks.3.norm``."""
    modules = name.split(_SEPARATOR)
    return _SEPARATOR.join(_module_without_numbers(module) for module in modules)


def _module_without_numbers(module: str) -> str:
    return ".".join("*" if step.isdigit() else step for step in module.split("."))


def _common_prefix(unit: str) -> str:
    """The module that contains all modules of a unit, as a prefix of parameters' names.

    ``blocks.3.`` for the unit ``blocks.3.a, blocks.3.b``; ``head.`` for the unit ``head``; "" for
    the model itself.
    """
    if not unit:
        return ""
    paths = [module.split(".") for module in unit.split(_SEPARATOR)]
    prefix = ""
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        prefix += f"{steps[0]}."
    return prefix
