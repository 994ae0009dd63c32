"""What `xray` returns, and how two of them differ: as text, Markdown, HTML and JSON."""

import dataclasses
import difflib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_lab.report import Printed, Table, bytes_text, listed, plural, share_text, short_name
from amp_lab.tracing.module_table import ModuleRow, ModuleTable, named_outputs
from amp_lab.tracing.ops_seen import LOWER_DTYPES
from amp_lab.tracing.records import LOSS, Cast, OpRecord, is_of_loss, work_of
from amp_lab.tracing.running_module import Outputs

_MAX_LINES = 28  # of the table; deeper modules are summed up
_DEEPEST = 12


@dataclass(frozen=True, repr=False)
class Xray(Printed):
    """What `xray` found; `str` of it is made to be read."""

    model: str  # its class
    device_type: str
    dtype: torch.dtype  # what autocast computes in; torch.float32: autocast was off
    real: bool
    rows: list[OpRecord]
    casts: list[Cast]
    output_dtypes: list[torch.dtype]  # of each tensor of the output, in order
    outputs: Outputs
    loss_dtype: torch.dtype | None
    raised: str | None  # what autocast made fail, if it did: the rows end there
    advice: list[str]  # what to look at, in sentences; each is proved by the rows and casts
    classes: dict[str, str] = field(repr=False)  # of each module
    modules: list[ModuleRow] = field(repr=False)  # all of them, in the model's order
    decisions: str = ""  # what to say if the trace took decisions of a run on the CPU
    autocast_off: str = ""  # what to say if it was left off because of the model's weights
    compiled: bool = False  # whether the model, or a part of it, is; it was run in eager mode
    training: bool = True  # whether the model was in training mode

    @property
    def title(self) -> str:
        """What was X-rayed, in a line."""
        off = self.dtype is torch.float32
        how = "autocast off" if off else f"autocast {short_name(self.dtype)}"
        seen = "a real run" if self.real else "fake tensors, no such device needed"
        return f"{self.model} on {self.device_type}, {how} ({seen})"

    @property
    def low_share(self) -> float:
        """Share of the arithmetic of matrix products and convolutions in low precision, 0 to 1."""
        low = work_of(row for row in self.rows if row.dtype in LOWER_DTYPES)
        return low / work_of(self.rows) if low else 0.0

    def by_module(self, depth: int | None = None) -> ModuleTable:
        """What each module returns and the parameters in it, as torchinfo shows a model.

        It has a row for the model and one for each module down to `depth`: 1 for the parts of the
        model, 2 for theirs too; None for all. Raises `OptionError` for a depth below 1.
        """
        facts = list(self._remarks())
        if self.raised is not None:
            facts.insert(0, f"Only under autocast: {self.raised}. What follows was not run.")
        return ModuleTable.of(self.modules, depth, self.title, work_of(self.rows), facts)

    def _contents(self) -> dict[str, Any]:
        contents = vars(self) | {"outputs": named_outputs(self.outputs)}
        del contents["classes"]
        del contents["modules"]  # `by_module` has them
        return contents

    def _table(self) -> Table:
        total = work_of(self.rows)
        return Table(
            ["module", "class", "ops", "work", "work in", "other ops in", "casts", "output"],
            [line.cells(total) for line in _Outline(self).fitting_lines()],
            caption=self.title,
            facts=list(self._facts()),
            advice=self.advice,
            right=(2, 3, 6),
        )

    def _facts(self) -> Iterator[str]:
        yield from self._remarks()
        if self.dtype is not torch.float32:
            share, low = f"{100 * self.low_share:.1f} %", short_name(self.dtype)
            yield f"{share} of the work of matrix products and convolutions is done in {low}."
            weights = [cast for cast in self.casts if cast.is_of_parameter]
            cached, others = sum(cast.cached for cast in weights), len(self.casts) - len(weights)
            yield (
                f"Autocast inserted {plural(len(self.casts), 'cast')}: {len(weights):,} of "
                f"parameters ({cached:,} kept in its cache), {others:,} of other values; they "
                f"write {bytes_text(sum(cast.nbytes for cast in self.casts))}."
            )
            if cached and not self.training:
                kept = bytes_text(sum(cast.nbytes for cast in weights if cast.cached))
                yield (
                    f"In evaluation mode: under no_grad the cache keeps {kept} of casts until the "
                    "autocast block ends; under inference_mode it keeps none, and each use of a "
                    "weight casts it anew."
                )
        outputs = [
            f"{place} {short_name(dtype)} {shape}".lstrip()
            for place, (dtype, shape) in self.outputs.items()
        ]
        if outputs:
            yield f"Output: {listed(outputs, 6)}."
        if self.loss_dtype is not None:
            yield self._loss_fact()

    def _remarks(self) -> Iterator[str]:
        """How the model was run, if not in the usual way."""
        if self.autocast_off:
            yield self.autocast_off
        if self.compiled:
            yield "The model is compiled; these are its ops in eager mode."
        if self.decisions:
            yield self.decisions

    def _loss_fact(self) -> str:
        """The dtype of the loss, and that of an op of it which was in low precision before."""
        said = f"Loss: {short_name(self.loss_dtype)}"
        low = [row for row in self.rows if is_of_loss(row) and row.dtype in LOWER_DTYPES]
        if low and self.loss_dtype not in LOWER_DTYPES:
            said += f", computed from the {low[0].op.strip('_')} in {short_name(low[0].dtype)}"
        return f"{said}."


@dataclass(frozen=True)
class _Line:
    """A line of the table: a module, or several alike in a row."""

    label: str
    kind: str
    rows: list[OpRecord]  # of one of the modules
    casts: list[Cast]
    times: int = 1

    def cells(self, total: int) -> list[str]:
        """The cells of the table; `total` is the work of the whole model."""
        outputs = self.rows[-1].out_dtypes if self.rows else ()
        return [
            self.label,
            self.kind,
            f"{self.times * len(self.rows):,}",
            share_text(self.times * work_of(self.rows), total),
            self._mix([row.dtype for row in self.rows if row.flops]),
            self._mix([row.dtype for row in self.rows if not row.flops]),
            f"{self.times * len(self.casts):,}" if self.casts else "-",
            short_name(next(iter(outputs), None)),
        ]

    def _mix(self, dtypes: list[torch.dtype | None]) -> str:
        counts = Counter(short_name(dtype) for dtype in dtypes if dtype).most_common()
        if len(counts) == 1:
            return counts[0][0]
        return ", ".join(f"{name} {self.times * count:,}" for name, count in counts) or "-"


class _Outline:
    """The modules that ran as a tree, from which the table takes as many levels as fit."""

    def __init__(self, result: Xray):
        self._classes = result.classes
        self._own: dict[str, tuple[list[Any], list[Any]]] = {}  # ops and casts in a module's code
        for record in (*result.rows, *result.casts):
            own = self._own.setdefault(record.module, ([], []))
            own[isinstance(record, Cast)].append(record)
        inside: dict[str, set[str]] = defaultdict(set)  # module: its parts that ran
        for module in self._own:
            while module and module != LOSS:
                parent = module.rpartition(".")[0]
                inside[parent].add(module)
                module = parent
        # In the model's order.
        self._parts = {m: [n for n in result.classes if n in parts] for m, parts in inside.items()}
        # To find modules alike, it is asked for the same ones again and again.
        self._below = functools.cache(self._lines_below)

    def fitting_lines(self) -> list[_Line]:
        """The lines of as many levels as the table may be long."""
        best = self._lines(1)
        for depth in range(2, _DEEPEST):
            deeper = self._lines(depth)
            if len(deeper) > _MAX_LINES or deeper == best:
                break
            best = deeper
        return best

    def _lines(self, depth: int) -> list[_Line]:
        lines = []
        for line in self._below("", depth):
            at_top = line.label in ("", " itself")
            label = f"the model{line.label}" if at_top else line.label
            lines.append(dataclasses.replace(line, label=label))
        if LOSS in self._own:
            lines.append(_Line(LOSS, "loss_fn", *self._own[LOSS]))
        return lines

    def _lines_below(self, module: str, depth: int) -> tuple[_Line, ...]:
        """The lines of a module, without its name: its own, and its parts' down to a depth."""
        kind, parts = self._classes.get(module, ""), self._parts.get(module, [])
        if not depth or not parts:
            inside = [m for m in self._own if m == module or m.startswith(f"{module}.")]
            rows = [row for m in inside for row in self._own[m][0]]
            casts = [cast for m in inside for cast in self._own[m][1]]
            return (_Line("", kind, rows, casts),)
        lines = [_Line(" itself", kind, *self._own[module])] if module in self._own else []

        def form(part: str) -> tuple[str, list[list[str]]]:
            """``blocks.`` of ``blocks.3``, and what its lines say."""
            lines = [line.cells(total=1) for line in self._below(part, _DEEPEST)]
            return part.rstrip("0123456789"), lines

        # Numbered neighbours that did the same, such as the blocks of a transformer, are one line.
        for (stem, _), (first, *others) in itertools.groupby(parts, form):
            to_last = f" … {others[-1].removeprefix(stem)}" if others else ""
            for line in self._below(first, depth - 1):
                label = first[len(module) :] + to_last + line.label
                times = line.times * (1 + len(others))
                lines.append(dataclasses.replace(line, label=label, times=times))
        return tuple(lines)


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """Two X-rays side by side; `str` of it is made to be read."""

    a: Xray
    b: Xray
    # Ops that differ in a dtype, and those that only one of the two ran.
    different: list[tuple[OpRecord | None, OpRecord | None]]

    @property
    def names(self) -> tuple[str, str]:
        """A short name for each."""
        a, b = (f"{x.device_type} {short_name(x.dtype)}" for x in (self.a, self.b))
        return (a, b) if a != b else (f"{a} (a)", f"{b} (b)")

    def _contents(self) -> dict[str, Any]:
        return {"names": self.names, "different": self.different}

    def _table(self) -> Table:
        groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for left, right in self.different:
            row = left or right
            assert row is not None, "of each pair one did run"
            groups[row.called, _flow(left), _flow(right)].append(row.module or "the model")
        return Table(
            ["called", "ops", *self.names, "where"],
            [
                [called, f"{len(modules):,}", a, b, listed(list(dict.fromkeys(modules)), 3)]
                for (called, a, b), modules in groups.items()
            ],
            caption=f"{self.a.model}: {self.names[0]} against {self.names[1]}",
            facts=list(self._facts()),
            right=(1,),
        )

    def _facts(self) -> Iterator[str]:
        total = len(self.a.rows) + sum(left is None for left, _ in self.different)
        yield f"{len(self.different):,} of {total:,} ops differ."
        for name, x in zip(self.names, (self.a, self.b), strict=True):
            outputs = ", ".join(dict.fromkeys(map(short_name, x.output_dtypes))) or "none"
            low = f"{100 * x.low_share:.1f} % of the work in low precision"
            yield f"{name}: {low}, {plural(len(x.casts), 'cast')}, output {outputs}."


def _flow(row: OpRecord | None) -> str:
    """The dtype that an op computed in, and what it returned if that is another."""
    if row is None:
        return "not run"
    dtypes = dict.fromkeys(dtype for dtype in (row.dtype, *row.out_dtypes[:1]) if dtype)
    return " → ".join(map(short_name, dtypes)) or "-"


def compare(a: Xray, b: Xray) -> Comparison:
    """Two X-rays of one model side by side: another device type, dtype or version of the model."""
    different: list[tuple[OpRecord | None, OpRecord | None]] = []
    keys = [[(row.module, row.op) for row in x.rows] for x in (a, b)]
    # Without autojunk, ops that occur in hundreds of places would be matched by guessing no more.
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        left, right = a.rows[i1:i2], b.rows[j1:j2]
        if tag == "equal":
            pairs = zip(left, right, strict=True)
            different += [(x, y) for x, y in pairs if _dtypes(x) != _dtypes(y)]
        else:
            different += [(row, None) for row in left] + [(None, row) for row in right]
    return Comparison(a, b, different)


def _dtypes(row: OpRecord) -> tuple:
    return row.in_dtypes, row.out_dtypes, row.product_dtype
