"""The X-ray of a model by module, as in torchinfo: outputs and parameters of each module."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp_lab.core.errors import OptionError
from amp_lab.core.report import Printed, Table, bytes_text, listed, plural, rate_text, short_name
from amp_lab.tracing.running_module import ModuleCalls, Outputs

_MAX_TENSORS_IN_CELL = 3


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model: the outputs of its calls, and its parameters."""

    name: str  # qualified; "": the model itself
    kind: str  # the name of its class
    depth: int  # 0: the model itself
    calls: int  # how often its forward ran
    has_forward: bool  # False for containers such as nn.ModuleList
    outputs: tuple[Outputs, ...]  # the different outputs of its calls, in order
    parameters: int  # numbers in its parameters and those of its children; shared ones count once
    own_parameters: int  # numbers in its own parameters, without those of its children
    frozen: int  # of `parameters`, those that require no gradient
    nbytes: int  # bytes of `parameters`
    tied: dict[str, str]  # own parameters of an earlier module too: name here, first name in model
    other_names: tuple[str, ...]  # further names of this module in the model

    @property
    def notes(self) -> list[str]:
        """Remarks for the last column: called several times, frozen, tied."""
        notes = []
        if self.calls > 1:
            notes.append(f"called {self.calls:,} times")
        if not self.calls and self.has_forward:
            notes.append("forward not called")
        if self.frozen:
            all_are_frozen = self.frozen == self.parameters
            notes.append("frozen" if all_are_frozen else f"{self.frozen:,} frozen")
        notes += [f"{name} is {first_name}" for name, first_name in self.tied.items()]
        if self.other_names:
            notes.append(f"is {listed(list(self.other_names), 2)} too")
        return notes

    def cells(self) -> list[str]:
        """The cells of the module's row in the table."""
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
    """``(8, 16)`` for one tensor; ``logits (8, 16), loss ()`` for several."""
    texts = []
    for path, (_, shape) in outputs.items():  # the path is "" if the output is one tensor
        texts.append(f"{path} {shape}".lstrip())
    return listed(texts, _MAX_TENSORS_IN_CELL) or "no tensor"


def _dtypes_text(outputs_of_calls: tuple[Outputs, ...]) -> str:
    """The different dtypes in the outputs of all calls: ``bf16, fp32``; "-" if there are none."""
    names: dict[str, None] = {}  # a set that keeps the order
    for outputs in outputs_of_calls:
        for dtype, _ in outputs.values():
            names[short_name(dtype)] = None
    return ", ".join(names) or "-"


def module_rows(model: nn.Module, calls: ModuleCalls) -> list[ModuleRow]:
    """A row for each module, in the order of `named_modules`; a shared module has one row.

    `calls` are the calls that hooks counted in a forward pass.
    """
    all_names: dict[int, list[str]] = defaultdict(list)  # of each module, by its `id`
    for name, module in model.named_modules(remove_duplicate=False):
        all_names[id(module)].append(name)
    first_names: dict[int, str] = {}  # of each parameter, as `_find_tied_parameters` needs it
    rows = []
    for name, module in model.named_modules():
        module_type = type(module)
        own_parameters = list(module.parameters(recurse=False))
        parameters = list(module.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        row = ModuleRow(
            name=name,
            kind=module_type.__name__,
            depth=_depth(name),
            calls=calls.counts[name],
            has_forward=module_type.forward is not nn.Module.forward,
            outputs=tuple(calls.outputs[name]),
            parameters=_number_count(parameters),
            own_parameters=_number_count(own_parameters),
            frozen=_number_count(parameters) - _number_count(trainable),
            nbytes=sum(parameter.nbytes for parameter in parameters),
            tied=_find_tied_parameters(name, module, first_names),
            other_names=tuple(all_names[id(module)][1:]),
        )
        rows.append(row)
    return rows


def _number_count(parameters: list[nn.Parameter]) -> int:
    """How many numbers there are in some parameters."""
    return sum(parameter.numel() for parameter in parameters)


def _depth(name: str) -> int:
    """How deep a module is nested: 0 for the model, 2 for ``layers.0``."""
    if not name:
        return 0
    return name.count(".") + 1


def _find_tied_parameters(
    module_name: str, module: nn.Module, first_names: dict[int, str]
) -> dict[str, str]:
    """The parameters of a module that an earlier module has too.

    Returns the first name in the model of each, by its name in the module. `first_names` has the
    first names of all parameters so far, by the parameter's `id`; the function adds to it.
    """
    tied = {}
    for name, parameter in module.named_parameters(recurse=False):
        full_name = f"{module_name}.{name}".lstrip(".")
        first_name = first_names.setdefault(id(parameter), full_name)
        if first_name != full_name:
            tied[name] = first_name
    return tied


def named_outputs(outputs: Outputs) -> dict[str, dict[str, Any]]:
    """The outputs of a call for JSON: each (dtype, shape) as {"dtype": …, "shape": …}."""
    return {path: {"dtype": dtype, "shape": shape} for path, (dtype, shape) in outputs.items()}


@dataclass(frozen=True, repr=False)
class ModuleTable(Printed):
    """A row for each module down to a depth; made by `Xray.by_module`."""

    title: str
    depth: int | None  # the deepest modules to show; None: all
    rows: list[ModuleRow]  # the first is the model itself
    flops: int  # of the forward pass and the loss
    facts: list[str]

    @classmethod
    def of(
        cls, rows: list[ModuleRow], depth: int | None, title: str, flops: int, facts: list[str]
    ) -> "ModuleTable":
        """Make the table of the rows down to `depth`; raises `OptionError` for a wrong depth.

        `flops` counts the forward pass and the loss. `facts` are further sentences to print below
        the table.
        """
        if depth is not None:
            if not isinstance(depth, int) or depth < 1:
                given = f"depth {depth!r}"
                raise OptionError(f"{given}: give an integer of at least 1, or None for all levels")
            rows = [row for row in rows if row.depth <= depth]
        return cls(title, depth, rows, flops, facts)

    @property
    def parameters(self) -> int:
        """The number of values in the parameters of the model; tied parameters count once."""
        return self.rows[0].parameters

    @property
    def trainable(self) -> int:
        """The number of these values that require a gradient."""
        return self.parameters - self.rows[0].frozen

    def _contents(self) -> dict[str, Any]:
        """The values for JSON."""
        rows = []
        for row in self.rows:
            outputs = [named_outputs(outputs_of_call) for outputs_of_call in row.outputs]
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
        """The printed table, with a row for each module and sentences on parameters and FLOPs."""
        model = self.rows[0]
        size = f"{plural(model.parameters, 'parameter')} ({bytes_text(model.nbytes)})"
        split = f"{self.trainable:,} trainable, {model.frozen:,} frozen. Tied weights count once."
        work = f"{self.flops:,} FLOP"
        if self.flops >= 1e6:
            work = rate_text(self.flops, "FLOP")
        facts = [
            f"{size}: {split}",
            f"Matmuls, convolutions and attention: {work}. A multiply-add counts as two FLOPs.",
        ]
        return Table(
            ["module", "class", "output", "dtype", "parameters", "own", "notes"],
            [row.cells() for row in self.rows],
            caption=self.title,
            facts=[*facts, *self.facts],
            foot=[["total", "", "", "", f"{self.parameters:,}", "", ""]],
            right=(4, 5),
        )
