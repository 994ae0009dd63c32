"""What `xray_sharding` returns, as text, Markdown, HTML and JSON."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from amp_lab.report import Printed, Table, listed, short_name
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
        object.__setattr__(self, "advice", [line for rule in RULES for line in rule(self)])

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
        forms: dict[str, list[str | None]] = {}
        for name in [*[unit.name for unit in self.units], None]:
            rows = self._described(name)
            if rows:
                forms.setdefault(f"{name and _without_numbers(name)} {rows}", []).append(name)
        for first, *others in forms.values():
            count = 1 + len(others)
            label = "no unit" if first is None else first or "the model"
            label = f"{_without_numbers(label)}, {count} units" if others else label
            for i, (parameters, values, *cells) in enumerate(self._described(first)):
                total = f"{count * int(values):,}"
                yield [label if i == 0 else "", parameters, total, *cells]

    def _described(self, name: str | None) -> list[list[str]]:
        """The cells of a unit's rows, all but its name."""
        unit = next((unit for unit in self.units if unit.name == name), None)
        groups: dict[tuple, list[ShardedParameter]] = {}
        for parameter in self.of(name):
            groups.setdefault((parameter.dtypes, parameter.trained), []).append(parameter)
        taken = short_name(unit.inputs) if unit and unit.inputs else "as they come"
        around = _around(name or "")
        rows = []
        for (dtypes, trained), members in groups.items():
            local = [parameter.name[len(around) :] for parameter in members]
            cells = [*map(short_name, dtypes[:3]), short_name(dtypes[3]) if trained else "frozen"]
            values = str(sum(p.elements for p in members))
            rows.append([listed(local, 2), values, *cells, taken])
        if unit and not rows:
            rows.append(["none of its own", "0", "-", "-", "-", "-", taken])
        return rows

    def _facts(self) -> Iterator[str]:
        named = [
            f"{'argument ' * name.isdigit()}{name} {short_name(given)}"
            + ("" if given is got else f" → {short_name(got)}")
            for name, (given, got) in self.inputs.items()
        ]
        if named:
            yield f"Inputs: {listed(named, 6)}."
        kinds = Counter(short_name(buffer.dtype) for buffer in self.buffers)
        if kinds:
            told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
            yield f"Buffers, which stay as they are: {told}."
        whole = next((unit for unit in self.units if not unit.name), None)
        if whole is not None and whole.output_dtype is not None:
            yield f"Output: cast to {short_name(whole.output_dtype)}."
        if self.hook is not None:
            yield f"Gradients are summed by {self.hook!r}, in a dtype that only a step shows."


def _without_numbers(name: str) -> str:
    """``blocks.*.norm`` of ``blocks.3.norm``; of several modules, of each."""
    modules = [module.split(".") for module in name.split(_AND)]
    return _AND.join(".".join("*" if p.isdigit() else p for p in parts) for parts in modules)


def _around(unit: str) -> str:
    """What the names of a unit's modules begin with, up to and with a dot."""
    paths = [module.split(".") for module in unit.split(_AND)]
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    common = ".".join(parts[0] for parts in alike)
    return f"{common}." if common else ""
