"""An X-ray by module, as torchinfo shows a model: what each module returns, and its parameters."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp_lab.core.errors import OptionError
from amp_lab.core.report import Printed, Table, bytes_text, listed, plural, rate_text, short_name
from amp_lab.tracing.running_module import ModuleCalls, Outputs

_MOST_TENSORS = 3  # of an output, in a cell of the table


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model: what its calls returned, and the parameters in it."""

    name: str  # qualified; "": the model itself
    kind: str  # its class
    depth: int  # 0: the model itself
    calls: int  # of its forward
    has_forward: bool  # an nn.ModuleList, say, has none
    outputs: tuple[Outputs, ...]  # of its calls, the different ones in order
    parameters: int  # in it and below it; one that stands in two places counts once
    own_parameters: int  # in it alone
    frozen: int  # of `parameters`, those that require no gradient
    nbytes: int  # of `parameters`
    tied: dict[str, str]  # own parameters that are others too: the first name in the model
    other_names: tuple[str, ...]  # of the same module, elsewhere in the model

    @property
    def notes(self) -> list[str]:
        """What is special about it."""
        notes = []
        if self.calls > 1:
            notes.append(f"called {self.calls:,} times")
        if not self.calls and self.has_forward:
            notes.append("forward not called")
        if self.frozen:
            is_all = self.frozen == self.parameters
            notes.append("frozen" if is_all else f"{self.frozen:,} frozen")
        notes += [f"{own} is {first}" for own, first in self.tied.items()]
        if self.other_names:
            notes.append(f"is {listed(list(self.other_names), 2)} too")
        return notes

    def cells(self) -> list[str]:
        """The cells of its row."""
        shapes = dict.fromkeys(map(_shapes_text, self.outputs))
        return [
            self.name or "the model",
            self.kind,
            " or ".join(shapes) or "-",
            _dtypes_text(self.outputs),
            f"{self.parameters:,}",
            f"{self.own_parameters:,}",
            "; ".join(self.notes),
        ]


def _shapes_text(outputs: Outputs) -> str:
    """``(8, 16)``; of several tensors with their places, ``logits (8, 16), loss ()``."""
    texts = [f"{place} {shape}".lstrip() for place, (_, shape) in outputs.items()]
    return listed(texts, _MOST_TENSORS) or "no tensor"


def _dtypes_text(several: tuple[Outputs, ...]) -> str:
    names: dict[str, None] = {}  # in order, each once
    for outputs in several:
        for dtype, _ in outputs.values():
            names[short_name(dtype)] = None
    return ", ".join(names) or "-"


def module_rows(model: nn.Module, calls: ModuleCalls) -> list[ModuleRow]:
    """A row for each module of a model, in its order; one of several names is under the first."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    first_names: dict[int, str] = {}
    rows = []
    for name, module in model.named_modules():
        kind = type(module)
        own = list(module.parameters(recurse=False))
        inside = list(module.parameters())
        trainable = [parameter for parameter in inside if parameter.requires_grad]
        row = ModuleRow(
            name=name,
            kind=kind.__name__,
            depth=_depth(name),
            calls=calls.counts[name],
            has_forward=kind.forward is not nn.Module.forward,
            outputs=tuple(calls.outputs[name]),
            parameters=_size(inside),
            own_parameters=_size(own),
            frozen=_size(inside) - _size(trainable),
            nbytes=sum(parameter.nbytes for parameter in inside),
            tied=_tied_parameters(name, module, first_names),
            other_names=tuple(names[id(module)][1:]),
        )
        rows.append(row)
    return rows


def _size(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _depth(name: str) -> int:
    if not name:
        return 0
    return name.count(".") + 1


def _tied_parameters(
    module_name: str, module: nn.Module, first_names: dict[int, str]
) -> dict[str, str]:
    """Parameters of a module that are others too: the first name of each in the model.

    `first_names` has the first name of each parameter, by its id; those of the module are added.
    """
    tied = {}
    for name, parameter in module.named_parameters(recurse=False):
        full_name = f"{module_name}.{name}".lstrip(".")
        first_name = first_names.setdefault(id(parameter), full_name)
        if first_name != full_name:
            tied[name] = first_name
    return tied


def named_outputs(outputs: Outputs) -> dict[str, dict[str, Any]]:
    """Outputs with the words ``dtype`` and ``shape``, for JSON."""
    return {place: {"dtype": dtype, "shape": shape} for place, (dtype, shape) in outputs.items()}


@dataclass(frozen=True, repr=False)
class ModuleTable(Printed):
    """A row for each module down to a depth; made by `Xray.by_module`."""

    title: str
    depth: int | None  # None: all
    rows: list[ModuleRow]  # the first is the model itself
    flops: int  # of the forward pass and the loss
    facts: list[str]

    @classmethod
    def of(
        cls, rows: list[ModuleRow], depth: int | None, title: str, flops: int, facts: list[str]
    ) -> "ModuleTable":
        """The table of those rows that are not deeper; raises `OptionError` for no depth."""
        if depth is None:
            return cls(title, depth, rows, flops, facts)
        if not isinstance(depth, int) or depth < 1:
            raise OptionError(f"depth {depth!r}: give a whole number of 1 or more, or None for all")
        shown = [row for row in rows if row.depth <= depth]
        return cls(title, depth, shown, flops, facts)

    @property
    def parameters(self) -> int:
        """Numbers in the parameters of the model; tied ones count once."""
        return self.rows[0].parameters

    @property
    def trainable(self) -> int:
        """Those of `parameters` that require a gradient."""
        return self.parameters - self.rows[0].frozen

    def _contents(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            outputs = [named_outputs(of_call) for of_call in row.outputs]
            rows.append({**vars(row), "outputs": outputs})
        model = self.rows[0]
        total = {
            "parameters": self.parameters,
            "trainable": self.trainable,
            "frozen": model.frozen,
            "nbytes": model.nbytes,
            "flops": self.flops,
        }
        return {**vars(self), "rows": rows, "total": total}

    def _table(self) -> Table:
        model = self.rows[0]
        size = f"{plural(model.parameters, 'parameter')} ({bytes_text(model.nbytes)})"
        split = f"{self.trainable:,} trainable, {model.frozen:,} frozen. Tied weights count once."
        work = f"{self.flops:,} FLOP"
        if self.flops >= 1e6:
            work = rate_text(self.flops, "FLOP")
        facts = [
            f"{size}: {split}",
            f"Matmuls, convolutions and attention: {work}; a multiply-add counts as two.",
        ]
        return Table(
            ["module", "class", "output", "dtype", "parameters", "own", "notes"],
            [row.cells() for row in self.rows],
            caption=self.title,
            facts=[*facts, *self.facts],
            foot=[["total", "", "", "", f"{self.parameters:,}", "", ""]],
            right=(4, 5),
        )
