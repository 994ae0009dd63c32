"""What `xray_sharding` returns, as text, Markdown, HTML and JSON, and its remarks.

A rule is a function that yields lines: to add one, write it and add it to `RULES`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from amp_lab.report import Printed, Table, listed, short_name
from amp_lab.tracing.ops_seen import LOWER_DTYPES

FP32 = torch.float32
_AND = ", "  # between the names of several modules that are one unit
_IGNORED = "take them out of what DDP was told to ignore"


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


def _refused_units(found: ShardingXray) -> Iterator[str]:
    for unit in found.units:
        if unit.refusal is None:
            continue
        trained = [p for p in found.of(unit.name) if p.trained]
        by_dtype = [f"{short_name(d)} ({_names(own)})" for d, own in _by(trained, "stored")]
        why = f"parameters stored in {' and '.join(by_dtype)}"
        yield (
            f"{_place(unit.name)} fails at the first step, since FSDP2 takes one stored dtype in a "
            f"unit, and it has {why}: give each dtype a fully_shard of its own."
            if len(by_dtype) > 1
            else f"{_place(unit.name)} fails at the first step: {unit.refusal}."
        )


def _left_out(found: ShardingXray) -> Iterator[str]:
    alone = [p for p in found.of(None) if p.trained]
    if alone:
        cure = "call fully_shard on the model itself, last" if found.kind == "FSDP2" else _IGNORED
        yield (
            f"{_names(alone)}: in no unit, so the gradients are not summed and each rank trains a "
            f"copy of its own: {cure}."
        )


def _no_master_weights(found: ShardingXray) -> Iterator[str]:
    low = [p for p in found.parameters if p.trained and p.stored in LOWER_DTYPES]
    for dtype, own in _by(low, "stored"):
        name = short_name(dtype)
        casts = any(u.param_dtype is dtype for u in found.units)
        more = f" and the policy's param_dtype={dtype} has nothing to cast," if casts else ""
        yield (
            f"{_names(own)}: trained and stored in {name}, so there are no fp32 master weights,"
            f"{more} and small steps of the optimizer are rounded away: keep the model in fp32, "
            f"and leave {name} to {'param_dtype' if found.kind == 'FSDP2' else 'autocast'}."
        )


def _upcast_of_low(found: ShardingXray) -> Iterator[str]:
    wider = [p for p in found.parameters if p.computed.itemsize > p.stored.itemsize]
    for dtype, own in _by(wider, "computed"):
        stored = short_name(own[0].stored)
        yield (
            f"{_names(own)}: cast to {short_name(dtype)} from {stored}, which adds no digits, and "
            f"sends more: store them in {short_name(dtype)}, or leave param_dtype out."
        )


def _undone_upcast(found: ShardingXray) -> Iterator[str]:
    own = _undone(found)
    if own:
        low = short_name(own[0].computed)
        yield (
            f"{_names(own)}: in fp32 in a model of {low}, and cast back to {low} by the policy, so "
            f"their upcast changes nothing that is computed: {_keep_in_fp32()}."
        )


def _undone(found: ShardingXray) -> list[ShardedParameter]:
    """Parameters in fp32, of a model mostly in low precision, that are computed in that.

    Those trained on a frozen base, such as LoRA's, are in fp32 for the optimizer, as they should.
    """
    low = [p for p in found.parameters if p.stored in LOWER_DTYPES]
    total = sum(p.elements for p in found.parameters)
    if found.kind != "FSDP2" or 2 * sum(p.elements for p in low) < total:
        return []
    is_frozen_base = not any(p.trained for p in low)
    cast_back = [p for p in found.parameters if p.stored is FP32 and p.computed in LOWER_DTYPES]
    return [p for p in cast_back if p.of_norm or not (p.trained and is_frozen_base)]


def _norms_in_low_precision(found: ShardingXray) -> Iterator[str]:
    known = _undone(found)
    norms = [p for p in found.parameters if p.of_norm and p.stored is FP32 and p not in known]
    for dtype, own in _by([p for p in norms if p.computed in LOWER_DTYPES], "computed"):
        if found.kind == "FSDP2":
            yield (
                f"{_names(own)}: weights of norms, stored in fp32 and computed in "
                f"{short_name(dtype)}; if they were meant to stay in fp32, {_keep_in_fp32()}."
            )


def _keep_in_fp32() -> str:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to load

    own = "give them a fully_shard of their own, with MixedPrecisionPolicy(reduce_dtype=…)"
    if not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        return own
    return f"name them in param_dtype_override_fn, or {own}"


def _summed_in_low_precision(found: ShardingXray) -> Iterator[str]:
    low = [p for p in found.parameters if p.reduced in LOWER_DTYPES]
    for dtype, own in _by(low, "reduced"):
        fsdp = "reduce_dtype=torch.float32 sums them in fp32"
        ddp = "fp32 weights without a communication hook sum them in fp32"
        yield (
            f"{_names(own)}: gradients are summed in {short_name(dtype)}, which rounds at every "
            f"rank: {fsdp if found.kind == 'FSDP2' else ddp}."
        )


def _reduce_dtype_left_out(found: ShardingXray) -> Iterator[str]:
    for unit in found.units:
        trained = [p for p in found.of(unit.name) if p.trained and p.reduced is FP32]
        if trained and unit.param_dtype in LOWER_DTYPES and unit.reduce_dtype is None:
            yield (
                f"{_place(unit.name)}: reduce_dtype is left out, which means fp32 here and "
                f"{short_name(unit.param_dtype)} in torch before 2.15: write "
                "reduce_dtype=torch.float32."
            )
            return  # the same policy is mostly that of all


def _frozen_in_fp32(found: ShardingXray) -> Iterator[str]:
    frozen = [p for p in found.parameters if not p.trained and p.stored is FP32]
    for dtype, own in _by([p for p in frozen if p.computed in LOWER_DTYPES], "computed"):
        if found.kind == "FSDP2":
            yield (
                f"{_names(own)}: frozen, stored in fp32 and computed in {short_name(dtype)}; what "
                f"is not trained needs no master weights, and takes half in {short_name(dtype)}."
            )


def _buffers(found: ShardingXray) -> Iterator[str]:
    low_units = {u.name: u.param_dtype for u in found.units if u.param_dtype in LOWER_DTYPES}
    wide = [b for b in found.buffers if b.dtype is FP32 and b.unit in low_units and not b.of_norm]
    if wide:
        yield (
            f"{_names(wide)}: buffers stay in fp32, since a policy casts parameters and inputs "
            "alone, and what is computed with them comes out in fp32: cast them in forward."
        )
    rounded = [b for b in found.buffers if b.of_norm and b.dtype in LOWER_DTYPES]
    if rounded:
        yield f"{_names(rounded)}: running statistics in low precision, which soon stand still."


def _inputs_not_cast(found: ShardingXray) -> Iterator[str]:
    whole = next((unit for unit in found.units if not unit.name), None)
    if whole is None or whole.cast_forward_inputs or whole.param_dtype not in LOWER_DTYPES:
        return
    wide = [name for name, (_, got) in found.inputs.items() if got is FP32]
    if wide:
        yield (
            f"Inputs {listed(wide, 3)} reach the model in fp32, since cast_forward_inputs is off, "
            f"and its weights in {short_name(whole.param_dtype)}: forward has to cast all but "
            "those that are to stay so."
        )


# Each makes its sentences, or none if there is nothing to say.
RULES: tuple[Callable[[ShardingXray], Iterator[str]], ...] = (
    _refused_units,
    _left_out,
    _no_master_weights,
    _upcast_of_low,
    _undone_upcast,
    _norms_in_low_precision,
    _summed_in_low_precision,
    _reduce_dtype_left_out,
    _frozen_in_fp32,
    _buffers,
    _inputs_not_cast,
)


def _by(
    parameters: list[ShardedParameter], key: str
) -> list[tuple[torch.dtype, list[ShardedParameter]]]:
    """The parameters by one of their dtypes."""
    groups: dict[Any, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, key), []).append(parameter)
    return list(groups.items())


def _names(tensors: Iterable[ShardedParameter | ShardedBuffer]) -> str:
    """The first three of them."""
    return listed([tensor.name for tensor in tensors], 3)


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


def _place(unit: str) -> str:
    return f"Unit {unit!r}" if unit else "The model's own unit"
