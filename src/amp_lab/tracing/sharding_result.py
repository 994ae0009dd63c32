"""What `xray_sharding` returns, as text, Markdown, HTML and JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp_lab.core.report import Printed, Table, listed, short_name
from amp_lab.tracing.sharding_advice import RULES

_AND = ", "  # between the names of several modules that are one unit


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter, and the dtypes that it goes through in a training step."""

    name: str
    unit: str | None  # the name of its unit; None: it is in none
    stored: torch.dtype  # in which the optimizer changes it
    gathered: torch.dtype | None  # None: each rank has the whole, or torchao's own
    computed: torch.dtype  # in which it meets the activations
    reduced: torch.dtype | None  # of its gradient; None: not summed, or by a hook of the user's
    trained: bool
    elements: int
    of_norm: bool

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """All four, in the order of a step."""
        return self.stored, self.gathered, self.computed, self.reduced


class ShardedBuffer(NamedTuple):
    """A buffer, which neither FSDP2 nor DDP casts."""

    name: str
    unit: str | None
    dtype: torch.dtype
    of_norm: bool


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together; of DDP, the whole model."""

    name: str  # "": the model itself; of several modules, their names with ", " between them
    param_dtype: torch.dtype | None = None  # of its policy, and so the next three
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    refusal: str | None = None  # what torch raises at the first step, if it does

    @property
    def inputs(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; None: they stay as they come."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True, repr=False)
class ShardingXray(Printed):
    """What `xray_sharding` found; `str` of it is made to be read."""

    model: str  # its class
    kind: str  # FSDP2 or DDP
    units: list[Unit]  # in the model's order
    parameters: list[ShardedParameter]
    buffers: list[ShardedBuffer]
    inputs: dict[str, tuple[torch.dtype, torch.dtype]]  # as given, and as the model gets it
    hook: str | None = None  # of DDP: what sums the gradients in its place
    advice: list[str] = field(init=False)

    def __post_init__(self) -> None:
        advice: list[str] = []
        for rule in RULES:
            advice += rule(self)
        object.__setattr__(self, "advice", advice)

    def of(self, unit: str | None) -> list[ShardedParameter]:
        """The parameters of a unit."""
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
        """A row for each unit and dtypes; units alike, such as numbered blocks, share theirs."""
        for names in self._units_alike():
            label = _label(names)
            for parameters, values, *cells in self._rows_of_unit(names[0]):
                total = len(names) * int(values)
                yield [label, parameters, f"{total:,}", *cells]
                label = ""  # of the unit's other rows

    def _units_alike(self) -> Iterable[list[str | None]]:
        """The names of units that have rows, together where they differ in numbers alone.

        The last name is None, for the parameters that are in no unit.
        """
        groups: dict[tuple[str | None, str], list[str | None]] = {}
        for name in [*[unit.name for unit in self.units], None]:
            rows = self._rows_of_unit(name)
            if rows:
                pattern = None if name is None else _without_numbers(name)
                groups.setdefault((pattern, str(rows)), []).append(name)
        return groups.values()

    def _rows_of_unit(self, name: str | None) -> list[list[str]]:
        """The cells of a unit's rows, all but its name."""
        groups: dict[tuple, list[ShardedParameter]] = {}
        for parameter in self.of(name):
            groups.setdefault((parameter.dtypes, parameter.trained), []).append(parameter)
        unit = unit_named(name, self.units)
        inputs = "as they come"
        if unit is not None and unit.inputs is not None:
            inputs = short_name(unit.inputs)
        if unit is not None and not groups:
            return [["none of its own", "0", "-", "-", "-", "-", inputs]]
        prefix = _common_prefix(name or "")
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
    """The unit of a name; None if there is none."""
    for unit in units:
        if unit.name == name:
            return unit
    return None


def _input_text(name: str, given: torch.dtype, arrives: torch.dtype) -> str:
    """``argument 0 fp32 → bf16``: an input with its dtype, and the one that the model gets."""
    label = f"argument {name}" if name.isdigit() else name
    if given is arrives:
        return f"{label} {short_name(given)}"
    return f"{label} {short_name(given)} → {short_name(arrives)}"


def _label(names: list[str | None]) -> str:
    """What the table calls units alike."""
    first = names[0]
    label = first or "the model"
    if first is None:
        label = "no unit"
    if len(names) == 1:
        return label
    return f"{_without_numbers(label)}, {len(names)} units"


def _without_numbers(name: str) -> str:
    """``blocks.*.norm`` of ``blocks.3.norm``; of several modules, of each."""
    return _AND.join(_module_without_numbers(module) for module in name.split(_AND))


def _module_without_numbers(module: str) -> str:
    return ".".join("*" if step.isdigit() else step for step in module.split("."))


def _common_prefix(unit: str) -> str:
    """What the names of a unit's modules begin with, up to and with a dot."""
    if not unit:
        return ""
    paths = [module.split(".") for module in unit.split(_AND)]
    prefix = ""
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        prefix += f"{steps[0]}."
    return prefix
