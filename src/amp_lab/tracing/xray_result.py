"""The result of `xray`, and the differences of two results: as text, Markdown, HTML and JSON."""

import dataclasses
import difflib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from amp_lab.core.report import Printed, Table, bytes_text, listed, plural, share_text, short_name
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.tracing.module_table import ModuleRow, ModuleTable, named_outputs
from amp_lab.tracing.records import LOSS, Cast, OpRecord, bytes_of, is_of_loss, work_of
from amp_lab.tracing.running_module import Outputs

_MAX_LINES = 28  # of the table; deeper modules are summed up
_MAX_DEPTH = 12


@dataclass(frozen=True, repr=False)
class Xray(Printed):
    """The result of `xray`. Print it to see a table."""

    model: str  # the name of the model's class
    device_type: str  # such as "cuda"
    dtype: torch.dtype  # the dtype of autocast; torch.float32 if autocast was off
    real: bool  # whether the model ran on the device itself, not on fake tensors
    rows: list[OpRecord]  # in the order in which the ops ran
    casts: list[Cast]  # the casts that autocast inserted, in order
    output_dtypes: list[torch.dtype]  # dtype of each tensor of the output, in order
    outputs: Outputs  # dtype and shape of each tensor of the output, by its path
    loss_dtype: torch.dtype | None  # dtype of the result of `loss_fn`; None without it
    raised: str | None
    """An error that occurs only under autocast. `rows` end at the op that raised this error."""
    advice: list[str]  # advice as sentences; the rows and casts show the reasons
    modules: list[ModuleRow]  # all modules, in the model's order
    decisions: str = ""  # a sentence if the trace took the same branches as a run on the CPU
    autocast_off: str = ""  # a sentence if autocast is off because of the weights' dtype
    compiled: bool = False  # whether the model or a module is compiled; the trace ran in eager mode
    training: bool = True  # whether the model was in training mode

    @property
    def title(self) -> str:
        """The model, the device, the dtype of autocast and the kind of run, in one line."""
        autocast = "off" if self.dtype is torch.float32 else short_name(self.dtype)
        run = "a real run" if self.real else "fake tensors, without the device"
        return f"{self.model} on {self.device_type}, autocast {autocast} ({run})"

    @property
    def low_share(self) -> float:
        """Share of the FLOPs in matmuls and convolutions that run in low precision, from 0 to 1."""
        low = work_of(row for row in self.rows if row.dtype in LOWER_DTYPES)
        return low / max(1, work_of(self.rows))

    def by_module(self, depth: int | None = None) -> ModuleTable:
        """Return a table of the output and the parameters of each module, as torchinfo shows them.

        The table has a row for the model and for each module down to `depth`: 1 for the submodules
        of the model, 2 also for their submodules, None for all. Raises `OptionError` for a depth
        below 1.
        """
        facts = list(self._remarks())
        if self.raised is not None:
            facts.insert(
                0,
                f"The model fails only under autocast: {self.raised}. Everything after this "
                "op was not run.",
            )
        return ModuleTable.of(self.modules, depth, self.title, work_of(self.rows), facts)

    def _contents(self) -> dict[str, Any]:
        """The fields for JSON: outputs by name, and without `modules`, which `by_module` has."""
        contents = vars(self) | {"outputs": named_outputs(self.outputs)}
        del contents["modules"]
        return contents

    def _table(self) -> Table:
        total = work_of(self.rows)
        lines = _Outline(self).fitting_lines()
        return Table(
            [column.head for column in _COLUMNS],
            [line.cells(total) for line in lines],
            caption=self.title,
            facts=list(self._facts()),
            advice=self.advice,
            right=[index for index, column in enumerate(_COLUMNS) if column.is_right],
        )

    def _facts(self) -> Iterator[str]:
        yield from self._remarks()
        if self.dtype is not torch.float32:
            yield from self._autocast_facts()
        outputs = [
            f"{path} {short_name(dtype)} {shape}".lstrip()  # a tensor alone has no path
            for path, (dtype, shape) in self.outputs.items()
        ]
        if outputs:
            yield f"Output: {listed(outputs, 6)}."
        if self.loss_dtype is not None:
            yield self._loss_fact(self.loss_dtype)

    def _autocast_facts(self) -> Iterator[str]:
        """Sentences on what autocast did: the share of the work in low precision, and its casts."""
        share = 100 * self.low_share
        low = short_name(self.dtype)
        yield f"{share:.1f} % of the work of matmuls and convolutions is done in {low}."
        of_parameters = [cast for cast in self.casts if cast.is_of_parameter]
        cached = [cast for cast in of_parameters if cast.cached]
        others = len(self.casts) - len(of_parameters)
        yield (
            f"Autocast inserted {plural(len(self.casts), 'cast')}: {len(of_parameters):,} of "
            f"parameters ({len(cached):,} of these cached) and {others:,} of other values. The "
            f"casts write {bytes_text(bytes_of(self.casts))}."
        )
        if cached and not self.training:
            size = bytes_text(bytes_of(cached))
            yield (
                f"In evaluation mode under no_grad, the cache keeps {size} of casts until the "
                "autocast block ends. Under inference_mode, autocast has no cache and casts a "
                "weight again at each use."
            )

    def _remarks(self) -> Iterator[str]:
        """Sentences on how the model was run, if not in the usual way."""
        if self.autocast_off:
            yield self.autocast_off
        if self.compiled:
            yield "The model is compiled. The table shows its ops in eager mode."
        if self.decisions:
            yield self.decisions

    def _loss_fact(self, dtype: torch.dtype) -> str:
        """A sentence on the loss: its dtype and, if that is wide, its first op in low precision."""
        fact = f"Loss: {short_name(dtype)}"
        low = [row for row in self.rows if is_of_loss(row) and row.dtype in LOWER_DTYPES]
        if dtype in LOWER_DTYPES or not low:
            return f"{fact}."
        op = low[0].op.strip("_")
        return f"{fact}, computed from the {op} in {short_name(low[0].dtype)}."


@dataclass(frozen=True)
class _Line:
    """A line of the table: one module, or several alike that follow each other."""

    label: str  # the text in the first column
    class_name: str
    rows: list[OpRecord]  # of one of the modules
    casts: list[Cast]  # of one of the modules
    times: int = 1  # how many modules they are

    @property
    def has_records(self) -> bool:
        """Whether any op or cast belongs to it."""
        return bool(self.rows or self.casts)

    def cells(self, total: int) -> list[str]:
        """The cells of this line; `total` is the FLOPs of the whole model."""
        return [column.cell(self, total) for column in _COLUMNS]

    # The cells that take more than a line.

    def work_share(self, total: int) -> str:
        """The share of the model's FLOPs."""
        return share_text(self.times * work_of(self.rows), total)

    def work_dtypes(self) -> str:
        """The dtypes of matmuls and convolutions."""
        return self._count_text([row.dtype for row in self.rows if row.flops])

    def other_dtypes(self) -> str:
        """The dtypes of all other ops."""
        return self._count_text([row.dtype for row in self.rows if not row.flops])

    def cast_count(self) -> str:
        """How many casts autocast inserted; "-" for none."""
        casts = self.times * len(self.casts)
        return f"{casts:,}" if casts else "-"

    def output_dtype(self) -> str:
        """The dtype of the last op's output; "-" if there is none."""
        if not self.rows or not self.rows[-1].out_dtypes:
            return "-"
        return short_name(self.rows[-1].out_dtypes[0])

    def _count_text(self, dtypes: list[torch.dtype | None]) -> str:
        """The dtypes of some ops: ``bf16``, or ``bf16 24, fp32 2`` with how many ops have each.

        "-" if there are none.
        """
        counts = Counter(short_name(dtype) for dtype in dtypes if dtype)
        if len(counts) < 2:
            return next(iter(counts), "-")
        texts = [f"{name} {self.times * count:,}" for name, count in counts.most_common()]
        return ", ".join(texts)


@dataclass(frozen=True)
class _Column:
    """A column of the table of modules."""

    head: str
    cell: Callable[[_Line, int], str]  # given a line, and the FLOPs of the whole model
    is_right: bool = False  # whether it is aligned to the right


_COLUMNS = (
    _Column("module", lambda line, total: line.label),
    _Column("class", lambda line, total: line.class_name),
    _Column("ops", lambda line, total: f"{line.times * len(line.rows):,}", is_right=True),
    _Column("work", _Line.work_share, is_right=True),
    _Column("work in", lambda line, total: line.work_dtypes()),
    _Column("other ops in", lambda line, total: line.other_dtypes()),
    _Column("casts", lambda line, total: line.cast_count(), is_right=True),
    _Column("output", lambda line, total: line.output_dtype()),
)
"""The columns of the table. To add a column, add a row."""


class _Outline:
    """The lines of the table: the tree of modules that ran, down to the level that fits.

    A line stands for a module with all of its submodules. One level deeper, it is replaced by the
    lines of the submodules, and by one for the ops of the module's own code, if there are any.
    Numbered modules that did the same share their lines. For a transformer of 12 blocks:

    - depth 0: the model
    - depth 1: the model itself, stem, blocks
    - depth 2: the model itself, stem, blocks.0 … 11
    - depth 3: the model itself, stem, blocks.0 … 11 itself, blocks.0 … 11.attn, blocks.0 … 11.mlp
    """

    def __init__(self, result: Xray):
        # For each module by name: a line with its ops and casts and those of all its submodules.
        self._totals = {module.name: _Line("", module.kind, [], []) for module in result.modules}
        self._totals[LOSS] = _Line(LOSS, "loss_fn", [], [])
        for row in result.rows:
            for name in _with_parents(row.module):
                self._totals[name].rows.append(row)
        for cast in result.casts:
            for name in _with_parents(cast.module):
                self._totals[name].casts.append(cast)
        # For each module by name: the names of its direct submodules that ran, in order.
        self._submodules: dict[str, list[str]] = defaultdict(list)
        for module in result.modules:
            is_model = module.name == ""
            if not is_model and self._totals[module.name].has_records:
                parent = module.name.rpartition(".")[0]
                self._submodules[parent].append(module.name)
        # Cached, since `_key_of_alike` asks for the lines of the same modules again and again.
        self._cached_lines = functools.cache(self._lines_of_module)

    def fitting_lines(self) -> list[_Line]:
        """The lines down to the deepest level at which there are at most `_MAX_LINES`.

        Those of the first level are returned even if there are more.
        """
        fitting = self._lines(depth=1)
        for depth in range(2, _MAX_DEPTH):
            deeper = self._lines(depth)
            if len(deeper) > _MAX_LINES:
                break
            fitting = deeper
        return fitting

    def _lines(self, depth: int) -> list[_Line]:
        """The lines of the model down to a depth, and that of the loss."""
        lines = []
        for line in self._cached_lines("", depth):  # "" is the name of the model
            if line.label in ("", " itself"):
                line = dataclasses.replace(line, label=f"the model{line.label}")
            lines.append(line)
        if self._totals[LOSS].has_records:
            lines.append(self._totals[LOSS])
        return lines

    def _lines_of_module(self, module: str, depth: int) -> tuple[_Line, ...]:
        """The lines of a module and of its submodules, down to a depth below the module.

        Labels are without the module's name: "" for all of it, " itself" for its own code, and
        ``.conv1`` for a submodule.
        """
        total = self._totals[module]
        submodules = self._submodules[module]
        if depth == 0 or not submodules:
            return (total,)
        own_rows = [row for row in total.rows if row.module == module]
        own_casts = [cast for cast in total.casts if cast.module == module]
        itself = _Line(" itself", total.class_name, own_rows, own_casts)
        lines = [itself] if itself.has_records else []
        # Numbered neighbours that did the same, such as the blocks of a transformer, share lines.
        for _, group in itertools.groupby(submodules, self._key_of_alike):
            alike = list(group)
            first = alike[0]
            label = first.removeprefix(module)
            if len(alike) > 1:  # such as ``.0 … 11``
                last_number = alike[-1].removeprefix(_without_number(first))
                label += f" … {last_number}"
            for line in self._cached_lines(first, depth - 1):
                shared = dataclasses.replace(
                    line, label=label + line.label, times=line.times * len(alike)
                )
                lines.append(shared)
        return tuple(lines)

    def _key_of_alike(self, module: str) -> tuple[str, list[list[str]]]:
        """A key that is equal for numbered modules that did the same.

        It has the module's name without its number, and the cells of all lines below it.
        """
        # `total` only scales the share of the work, and equal work has equal shares.
        cells = [line.cells(total=1) for line in self._cached_lines(module, _MAX_DEPTH)]
        return _without_number(module), cells


def _with_parents(module: str) -> Iterator[str]:
    """The name of a module, and those of all modules around it, up to the model's, ""."""
    yield module
    while module and module != LOSS:
        module = module.rpartition(".")[0]
        yield module


def _without_number(module: str) -> str:
    """A module's name without the number at its end: ``blocks.`` for ``blocks.3``."""
    return module.rstrip("0123456789")


@dataclass(frozen=True, repr=False)
class XrayComparison(Printed):
    """Two X-rays side by side; `str` of it is a table to read."""

    a: Xray
    b: Xray
    # Pairs of ops that differ in a dtype; None in place of an op that one of the two did not run.
    different: list[tuple[OpRecord | None, OpRecord | None]]

    @property
    def names(self) -> tuple[str, str]:
        """A short name for each, such as ``cuda bf16``, with (a) and (b) if they are equal."""
        a = f"{self.a.device_type} {short_name(self.a.dtype)}"
        b = f"{self.b.device_type} {short_name(self.b.dtype)}"
        if a == b:
            return f"{a} (a)", f"{b} (b)"
        return a, b

    def _contents(self) -> dict[str, Any]:
        """The fields for JSON: without the two X-rays."""
        return {"names": self.names, "different": self.different}

    def _table(self) -> Table:
        """A row for each function that the model called, and for each pair of dtypes."""
        # The module of each op, by the function that the model called, and the dtypes of the op in
        # the two X-rays.
        modules_of: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for row_a, row_b in self.different:
            row = row_a or row_b
            assert row is not None, "at least one of the two ran this op"
            key = (row.called, _dtype_text(row_a), _dtype_text(row_b))
            modules_of[key].append(row.module or "the model")
        rows = []
        for (called, dtypes_a, dtypes_b), modules in modules_of.items():
            places = list(dict.fromkeys(modules))  # each module once
            rows.append([called, f"{len(modules):,}", dtypes_a, dtypes_b, listed(places, 3)])
        name_a, name_b = self.names
        return Table(
            ["op", "count", name_a, name_b, "modules"],
            rows,
            caption=f"{self.a.model}: {name_a} against {name_b}",
            facts=list(self._facts()),
            right=(1,),
        )

    def _facts(self) -> Iterator[str]:
        """How many ops differ, and a summary of each X-ray."""
        only_in_b = [row_b for row_a, row_b in self.different if row_a is None]
        total = len(self.a.rows) + len(only_in_b)
        yield f"{len(self.different):,} of {total:,} ops differ."
        for name, result in zip(self.names, (self.a, self.b), strict=True):
            dtypes = dict.fromkeys(map(short_name, result.output_dtypes))  # each once, as keys
            outputs = ", ".join(dtypes) or "none"
            low = f"{100 * result.low_share:.1f} % of the matmul FLOPs in low precision"
            yield f"{name}: {low}, {plural(len(result.casts), 'cast')}, output {outputs}."


def _dtype_text(row: OpRecord | None) -> str:
    """The dtype of an op: ``bf16``, or ``bf16 → fp32`` if it computes in bf16 and returns fp32.

    "not run" for None, and "-" if the op has neither a dtype nor outputs.
    """
    if row is None:
        return "not run"
    dtypes = [row.dtype, *row.out_dtypes[:1]]
    names = [short_name(dtype) for dtype in dtypes if dtype is not None]
    different_names = dict.fromkeys(names)  # the same name twice becomes one
    return " → ".join(different_names) or "-"


def compare_xrays(a: Xray, b: Xray) -> XrayComparison:
    """Align the ops of two X-rays by module and name, and return the ops that differ in a dtype.

    An op that is in only one X-ray counts as different.
    """
    # With autojunk it would ignore ops that occur in hundreds of places.
    matcher = difflib.SequenceMatcher(
        isjunk=None, a=_modules_and_ops(a), b=_modules_and_ops(b), autojunk=False
    )
    different: list[tuple[OpRecord | None, OpRecord | None]] = []
    for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        rows_a = a.rows[start_a:end_a]
        rows_b = b.rows[start_b:end_b]
        if tag != "equal":
            different += [(row, None) for row in rows_a]
            different += [(None, row) for row in rows_b]
            continue
        for row_a, row_b in zip(rows_a, rows_b, strict=True):
            if _dtypes(row_a) != _dtypes(row_b):
                different.append((row_a, row_b))
    return XrayComparison(a, b, different)


def _modules_and_ops(result: Xray) -> list[tuple[str, str]]:
    """The module and the name of each op, in order."""
    return [(row.module, row.op) for row in result.rows]


def _dtypes(row: OpRecord) -> tuple:
    """What a comparison looks at: the dtypes of the inputs, of the outputs, and of matmuls."""
    return row.in_dtypes, row.out_dtypes, row.product_dtype
