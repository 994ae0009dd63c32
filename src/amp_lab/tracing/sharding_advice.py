"""The advice of `xray_sharding`: parameters in no unit, no master weights, low-precision sums, …

A rule is a function that yields sentences on what it finds, or none: to add a rule, write it and
add it to `RULES`. Its docstring says which parameters, buffers or units it looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from amp_lab.core.remedies import Remedy, remedy
from amp_lab.core.report import listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES

if TYPE_CHECKING:
    from amp_lab.tracing.sharding_result import ShardedBuffer, ShardedParameter, ShardingXray

FP32 = torch.float32


def _remedy(code: str, when: str, text: str) -> Remedy:
    """A remedy whose code is "sharding." and then `code`; `when` says what it is for."""
    return remedy(f"sharding.{code}", when, text)


_TWO_DTYPES = _remedy(
    "two_dtypes",
    "a unit of FSDP2 has trained parameters of two dtypes",
    "{place} fails at the first step: FSDP2 needs one stored dtype for the trained parameters of "
    "a fully_shard call, and finds {dtypes}: give each dtype a call of its own.",
)
_IN_NO_UNIT = _remedy(
    "in_no_unit",
    "a trained parameter is in no unit of FSDP2",
    "{names}: not managed by FSDP2, so their gradients are not reduced and the ranks drift apart: "
    "call fully_shard on the model itself, last.",
)
_IGNORED = _remedy(
    "ignored",
    "DDP was told to ignore a trained parameter",
    "{names}: ignored by DDP, so their gradients are not averaged and the ranks drift apart: take "
    "them off the list of what DDP ignores.",
)
_NO_MASTER_WEIGHTS = _remedy(
    "no_master_weights",
    "trained parameters are stored in 16 bits",
    "{names}: trained and stored in {dtype}, so there are no fp32 master weights,{more} and small "
    "steps of the optimizer are rounded away: keep the model in fp32, and leave {dtype} to {to}.",
)
_UPCAST = _remedy(
    "upcast",
    "param_dtype is wider than what the parameters are stored in",
    "{names}: cast to {wide} from {stored}, which adds traffic but no precision: store them in "
    "{wide}, or leave param_dtype out and give inputs in {stored}.",
)
_UNDONE_UPCAST = _remedy(
    "undone_upcast",
    "a policy casts back what was left in fp32 in a 16-bit model",
    "{names}: kept in fp32 in a {low} model, but the policy casts them to {low} again, so they are "
    "still computed in {low}: {keep}.",
)
_LOW_NORMS = _remedy(
    "low_norms",
    "a policy computes norms in 16 bits",
    "{names}: weights of norms, stored in fp32 and computed in {low}; if they were meant to stay "
    "in fp32, {keep}.",
)
_LOW_SUM_FSDP = _remedy(
    "low_sum.fsdp",
    "FSDP2 sums gradients in 16 bits",
    "{names}: gradients are summed in {low}, which rounds at every rank: "
    "reduce_dtype=torch.float32 sums them in fp32.",
)
_LOW_SUM_DDP = _remedy(
    "low_sum.ddp",
    "DDP sums gradients in 16 bits",
    "{names}: gradients are summed in {low}, which rounds at every rank: fp32 weights without a "
    "communication hook sum them in fp32.",
)
_NO_REDUCE_DTYPE = _remedy(
    "no_reduce_dtype",
    "reduce_dtype is left out, which torch reads in two ways",
    "{place}: reduce_dtype is left out, which means fp32 here and {low} in torch before 2.15: "
    "write reduce_dtype=torch.float32.",
)
_FROZEN = _remedy(
    "frozen_in_fp32",
    "frozen parameters are stored in fp32 and computed in 16 bits",
    "{names}: frozen, stored in fp32 and computed in {low}. Frozen weights need no master copy: "
    "store them in {low} to halve their memory.",
)
_BUFFERS = _remedy(
    "buffers",
    "buffers in fp32 meet activations in 16 bits",
    "{names}: buffers stay in fp32, since a policy casts only parameters and inputs. Mixing dtypes "
    "gives fp32 or, in convolutions, an error, unless forward casts: buffer.to(x.dtype). A buffer "
    "that forward hands to another unit is cast there: where it has to stay in fp32, as angles of "
    "positions do, give that unit's policy cast_forward_inputs=False.",
)
_LOW_STATISTICS = _remedy(
    "low_statistics",
    "running statistics are stored in 16 bits",
    "{names}: running statistics in low precision, which soon stop changing: keep them in fp32.",
)
_INPUTS = _remedy(
    "inputs_not_cast",
    "cast_forward_inputs is off",
    "Inputs {names} reach the {low} model in fp32, since cast_forward_inputs is off: cast them in "
    "forward, except those that should stay fp32.",
)


def _refused_units(xray: ShardingXray) -> Iterator[str]:
    """Units of FSDP2 that fail at the first step, mostly because of parameters of two dtypes."""
    for unit in xray.units:
        if unit.refusal is None:
            continue
        place = _place(unit.name)
        trained = [p for p in xray.parameters_in(unit.name) if p.trained]
        groups = _group_by(trained, "stored")
        if len(groups) < 2:
            yield f"{place} fails at the first step: {unit.refusal}."
            continue
        dtypes = [f"{short_name(dtype)} ({_names(members)})" for dtype, members in groups]
        yield _TWO_DTYPES.sentence(place=place, dtypes=" and ".join(dtypes))


def _trained_in_no_unit(xray: ShardingXray) -> Iterator[str]:
    """Trained parameters that are in no unit of FSDP2, or that DDP ignores."""
    trained = [p for p in xray.parameters_in(None) if p.trained]
    if trained:
        cure = _IN_NO_UNIT if _is_fsdp(xray) else _IGNORED
        yield cure.sentence(names=_names(trained))


def _no_master_weights(xray: ShardingXray) -> Iterator[str]:
    """Trained parameters in 16 bits, a sentence for each dtype."""
    low = [p for p in xray.parameters if p.trained and p.stored in LOWER_DTYPES]
    for dtype, members in _group_by(low, "stored"):
        more = ""
        if any(unit.param_dtype is dtype for unit in xray.units):
            more = f" and the policy's param_dtype={dtype} has nothing to cast,"
        yield _NO_MASTER_WEIGHTS.sentence(
            names=_names(members),
            dtype=short_name(dtype),
            more=more,
            to="param_dtype" if _is_fsdp(xray) else "autocast",
        )


def _upcasts(xray: ShardingXray) -> Iterator[str]:
    """Parameters that are computed in a wider dtype than they are stored in."""
    wider = [p for p in xray.parameters if p.computed.itemsize > p.stored.itemsize]
    for dtype, members in _group_by(wider, "computed"):
        stored = short_name(members[0].stored)  # of the first alone: mostly all have the same
        yield _UPCAST.sentence(names=_names(members), wide=short_name(dtype), stored=stored)


def _advise_on_undone_upcasts(xray: ShardingXray) -> Iterator[str]:
    """Parameters kept in fp32 that the policy casts to 16 bits (see `_undone_upcasts`)."""
    parameters = _undone_upcasts(xray)
    if parameters:
        low = short_name(parameters[0].computed)  # of the first alone: mostly all have the same
        yield _UNDONE_UPCAST.sentence(names=_names(parameters), low=low, keep=_keep_in_fp32())


def _undone_upcasts(xray: ShardingXray) -> list[ShardedParameter]:
    """Parameters stored in fp32 in a model that is mostly in 16 bits, but computed in 16 bits.

    Somebody left them in fp32, and the policy casts them all the same. If the 16-bit parameters are
    all frozen, trained ones other than norms do not count: they are in fp32 for the optimizer, as
    the weights of LoRA should be.
    """
    if not _is_fsdp(xray):
        return []
    low = [p for p in xray.parameters if p.stored in LOWER_DTYPES]
    low_elements = sum(p.elements for p in low)
    if 2 * low_elements < sum(p.elements for p in xray.parameters):  # less than half
        return []
    downcast = _computed_in_low_precision(xray)
    if any(p.trained for p in low):
        return downcast
    return [p for p in downcast if p.of_norm or not p.trained]


def _computed_in_low_precision(xray: ShardingXray) -> list[ShardedParameter]:
    """Parameters that are stored in fp32 and computed in 16 bits."""
    return [p for p in xray.parameters if p.stored is FP32 and p.computed in LOWER_DTYPES]


def _norms_in_low_precision(xray: ShardingXray) -> Iterator[str]:
    """Weights of norms that FSDP2 casts to 16 bits, except those in `_undone_upcasts`."""
    if not _is_fsdp(xray):
        return
    undone = _undone_upcasts(xray)
    norms = [p for p in _computed_in_low_precision(xray) if p.of_norm and p not in undone]
    for dtype, members in _group_by(norms, "computed"):
        low = short_name(dtype)
        yield _LOW_NORMS.sentence(names=_names(members), low=low, keep=_keep_in_fp32())


def _keep_in_fp32() -> str:
    """How to keep parameters in fp32, with what this version of torch has."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to load

    policy = "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    own_unit = f"give them a fully_shard of their own, with {policy}"
    if not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        return own_unit
    return f"name them in param_dtype_override_fn, or {own_unit}"


def _summed_in_low_precision(xray: ShardingXray) -> Iterator[str]:
    """Parameters whose gradients are summed in 16 bits, by that dtype."""
    cure = _LOW_SUM_FSDP if _is_fsdp(xray) else _LOW_SUM_DDP
    low = [p for p in xray.parameters if p.reduced in LOWER_DTYPES]
    for dtype, members in _group_by(low, "reduced"):
        yield cure.sentence(names=_names(members), low=short_name(dtype))


def _reduce_dtype_left_out(xray: ShardingXray) -> Iterator[str]:
    """The first unit whose sums are in fp32 here, but in 16 bits with an older torch."""
    for unit in xray.units:
        if unit.param_dtype not in LOWER_DTYPES or unit.reduce_dtype is not None:
            continue
        if any(p.trained and p.reduced is FP32 for p in xray.parameters_in(unit.name)):
            low = short_name(unit.param_dtype)
            yield _NO_REDUCE_DTYPE.sentence(place=_place(unit.name), low=low)
            return  # one line is enough: most models have one policy for all units


def _frozen_in_fp32(xray: ShardingXray) -> Iterator[str]:
    """Frozen parameters that FSDP2 stores in fp32 and computes in 16 bits, by the 16-bit dtype."""
    if not _is_fsdp(xray):
        return
    frozen = [p for p in _computed_in_low_precision(xray) if not p.trained]
    for dtype, members in _group_by(frozen, "computed"):
        yield _FROZEN.sentence(names=_names(members), low=short_name(dtype))


def _buffers_in_fp32(xray: ShardingXray) -> Iterator[str]:
    """Buffers in fp32 in a unit whose parameters, and so activations, are in 16 bits."""
    low_units = {unit.name for unit in xray.units if unit.param_dtype in LOWER_DTYPES}
    in_low_units = [buffer for buffer in xray.buffers if buffer.unit in low_units]
    wide = [buffer for buffer in in_low_units if buffer.dtype is FP32 and not buffer.of_norm]
    if wide:
        yield _BUFFERS.sentence(names=_names(wide))


def _low_statistics(xray: ShardingXray) -> Iterator[str]:
    """Running statistics of norms, stored in 16 bits."""
    statistics = [buffer for buffer in xray.buffers if buffer.of_norm]
    low = [buffer for buffer in statistics if buffer.dtype in LOWER_DTYPES]
    if low:
        yield _LOW_STATISTICS.sentence(names=_names(low))


def _inputs_not_cast(xray: ShardingXray) -> Iterator[str]:
    """Inputs that reach a model in 16 bits in fp32, since its policy does not cast them."""
    root = next((unit for unit in xray.units if not unit.name), None)  # it gets the inputs
    if root is None or root.cast_forward_inputs or root.param_dtype not in LOWER_DTYPES:
        return
    wide = [name for name, (_, arrives) in xray.inputs.items() if arrives is FP32]
    if wide:
        yield _INPUTS.sentence(names=listed(wide, 3), low=short_name(root.param_dtype))


# The advice is in this order, the most serious first.
RULES: tuple[Callable[[ShardingXray], Iterator[str]], ...] = (
    _refused_units,
    _trained_in_no_unit,
    _no_master_weights,
    _upcasts,
    _advise_on_undone_upcasts,
    _norms_in_low_precision,
    _summed_in_low_precision,
    _reduce_dtype_left_out,
    _frozen_in_fp32,
    _buffers_in_fp32,
    _low_statistics,
    _inputs_not_cast,
)


def _group_by(
    parameters: list[ShardedParameter], attribute: str
) -> list[tuple[torch.dtype, list[ShardedParameter]]]:
    """Pairs of a dtype and the parameters that have it in an attribute, such as "stored"."""
    groups: dict[Any, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, attribute), []).append(parameter)
    return list(groups.items())


def _names(tensors: Iterable[ShardedParameter | ShardedBuffer]) -> str:
    """The names of the first three tensors, and how many more there are."""
    return listed([tensor.name for tensor in tensors], 3)


def _place(unit: str) -> str:
    """The text for a unit at the start of a sentence: ``Unit 'blocks.0'``."""
    if not unit:
        return "The model's own unit"
    return f"Unit {unit!r}"


def _is_fsdp(xray: ShardingXray) -> bool:
    return xray.kind == "FSDP2"
