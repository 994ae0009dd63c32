"""Find casts that are unnecessary, casts that lose values, and missing casts.

`advice` says how to add a rule.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from amp_lab.core.remedies import remedy
from amp_lab.core.report import bytes_text, dtype_name, listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES, largest_integer
from amp_lab.tracing.advice_rules import Rules, weight_casts
from amp_lab.tracing.records import Cast, bytes_of, place_of, places_of
from amp_lab.tracing.tracer import Tracer

RULES = Rules()

_FROZEN = remedy(
    "xray.frozen",
    "no parameter of a model requires a gradient, so autocast casts all weights in each call",
    "No parameter requires a gradient, so autocast caches no weight casts. Each use casts the "
    "weight again: {size} in this forward pass. Cast weights and inputs once with "
    "model.to(torch.{dtype}), and turn autocast off.",
    failure="AMP0033",
)
_OTHER_HALF = remedy(
    "xray.other_half",
    "autocast casts weights from one 16-bit format to the other",
    "Autocast casts weights from {own} to {low}, {loss}. Use autocast with dtype=torch.{dtype}, "
    "or keep the weights in fp32 with model.float().",
    failure="AMP0021",
)
# What autocast loses when it casts weights from the other 16-bit format to this one.
_LOSS_OF_CAST = {
    torch.float16: "which turns values above 65504 into inf and small values into 0",
    torch.bfloat16: "which keeps only 8 bits of each value",
}
_INTEGERS = remedy(
    "xray.integers",
    "autocast casts whole numbers, such as token positions, to 16 bits",
    "{called} in {where}: autocast casts whole numbers to {low}, which represents them exactly "
    "only up to {most:,}. If these positions or counts can be larger, run this op in fp32, under "
    "torch.autocast({device!r}, enabled=False).",
    failure="AMP0030",
)
_MIXED_OP = remedy(
    "xray.mixed_op",
    "a custom op gets fp32 and 16-bit tensors, and autocast has no rule for the op",
    "{op} in {where} gets {mixed}. Autocast has no rule for this custom op, so it does not cast "
    "these inputs. If the kernel needs one dtype, as flash attention does, use one of these ways. "
    "Cast before the call: {casts}. Or register a rule: torch.library.register_autocast({op!r}, "
    "{device!r}, torch.{dtype}). Or, if an autograd.Function calls the op, decorate its forward "
    "with @torch.amp.custom_fwd(device_type={device!r}, cast_inputs=torch.{dtype}) and its "
    "backward with @torch.amp.custom_bwd(device_type={device!r}).",
    failure="AMP0078",
)
_UNKNOWN_WORK = remedy(
    "xray.unknown_work",
    "a custom op has no formula for its FLOPs",
    "{op} in {where}: the FLOPs of this op are unknown, so the shares above do not count them. If "
    "the op multiplies matrices, register a formula with "
    "torch.utils.flop_counter.register_flop_formula(torch.ops.{packet}).",
)


@RULES.under_autocast
def _parameters_cast_at_each_use(trace: Tracer) -> Iterator[str]:
    """Report parameters that autocast casts several times, because it does not cache the cast."""
    uncached = [cast for cast in weight_casts(trace) if not cast.cached]
    counts = Counter((cast.what, cast.to_dtype) for cast in uncached)
    repeated_names = []
    for (what, _), count in counts.items():
        if count > 1:
            repeated_names.append(what.removeprefix("parameter "))  # "parameter head.weight"
    if repeated_names:
        most = max(counts.values())
        yield (
            f"Autocast casts {listed(repeated_names, 3)} again for each use, up to {most} times. "
            "It caches only casts of whole fp32 parameters that require a gradient."
        )


@RULES.under_autocast
def _frozen_model(trace: Tracer) -> Iterator[str]:
    """Report a model without trainable parameters, whose weights autocast casts at each use."""
    casts = weight_casts(trace)
    if trace.is_frozen and casts:
        yield _FROZEN.sentence(size=bytes_text(bytes_of(casts)), dtype=dtype_name(trace.dtype))


@RULES.under_autocast
def _weights_in_the_other_16_bit_format(trace: Tracer) -> Iterator[str]:
    """Report weights in bf16 that autocast casts to fp16, or the other way round."""
    weight_dtypes = {cast.from_dtype for cast in weight_casts(trace)}
    for dtype in LOWER_DTYPES:
        if dtype is trace.dtype or dtype not in weight_dtypes:
            continue
        yield _OTHER_HALF.sentence(
            own=short_name(dtype),
            low=short_name(trace.dtype),
            loss=_LOSS_OF_CAST[trace.dtype],
            dtype=dtype_name(dtype),
        )


@RULES.under_autocast
def _casts_of_integers(trace: Tracer) -> Iterator[str]:
    """Report functions for which autocast casts whole numbers, such as positions, to 16 bits."""
    casts_by_function: dict[str, list[Cast]] = defaultdict(list)
    for cast in trace.casts:
        if cast.of_integers and cast.to_dtype is trace.dtype:
            casts_by_function[cast.called].append(cast)
    for called, casts in casts_by_function.items():
        yield _INTEGERS.sentence(
            called=called,
            where=places_of(casts),
            low=short_name(trace.dtype),
            most=largest_integer(trace.dtype),
            device=trace.device_type,
        )


@RULES.under_autocast
def _ops_with_mixed_dtypes(trace: Tracer) -> Iterator[str]:
    """Report custom ops that get fp32 and 16-bit tensors, since autocast has no rule for them."""
    dtype = dtype_name(trace.dtype)
    # `trace.mixed` has such calls, each with the names of the modules that make it.
    for call, modules in trace.mixed.items():
        mixed = []  # texts such as "q, k in bf16"
        casts = []  # code such as "v.to(torch.bfloat16)"
        for argument_dtype, names in call.arguments:
            mixed.append(f"{listed(names)} in {short_name(argument_dtype)}")
            if argument_dtype is not trace.dtype:  # only these arguments need a cast
                casts += [f"{name}.to(torch.{dtype})" for name in names]
        yield _MIXED_OP.sentence(
            op=call.op,
            where=listed([place_of(module) for module in modules], 3),
            mixed=" and ".join(mixed),
            casts=", ".join(casts),
            device=trace.device_type,
            dtype=dtype,
        )


@RULES.always
def _unknown_work(trace: Tracer) -> Iterator[str]:
    """Report custom ops that have no registered formula for their FLOPs."""
    for op, modules in trace.unknown_work.items():
        yield _UNKNOWN_WORK.sentence(
            op=op,
            where=listed([place_of(module) for module in modules], 3),
            packet=op.replace("::", "."),
        )
