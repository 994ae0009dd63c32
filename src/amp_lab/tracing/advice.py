"""The remarks of an X-ray and their order: first a summary, last what the X-ray does not know.

A rule is a function that takes the trace and yields sentences. It yields no sentence if it does not
apply. To add a rule, write the function in the file of its subject, `precision_advice`,
`size_advice` or `cast_advice`, with the decorator `@RULES.under_autocast` or `@RULES.always`. The
order of the functions in the file is the order of the remarks.
"""

import math
from collections.abc import Iterator

from amp_lab.core.report import bytes_text, percent, short_name
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.tracing import cast_advice, precision_advice, size_advice
from amp_lab.tracing.advice_rules import Rules, is_low, weight_casts
from amp_lab.tracing.records import OpRecord, bytes_of, work_of
from amp_lab.tracing.tracer import Tracer

FIRST = Rules()
LAST = Rules()
PARTS = (FIRST, precision_advice.RULES, size_advice.RULES, cast_advice.RULES, LAST)
"""All rules, in the order of their remarks."""


def advise(trace: Tracer, raised: str | None) -> list[str]:
    """Return the remarks on a trace as sentences.

    `raised` describes an error of the model that only occurs under autocast; None if there is none.
    """
    lines = []
    if raised is not None:
        lines.append(f"The model fails only under autocast: {raised}. The table ends at this op.")
    for part in PARTS:
        # A trace without autocast has the dtype float32.
        rules = part.all if trace.dtype in LOWER_DTYPES else part.without_autocast
        for rule in rules:
            lines += rule(trace)
    return lines


@FIRST.under_autocast
def _verdict(trace: Tracer) -> Iterator[str]:
    """Summarize what autocast saves: the share of FLOPs in 16 bits, and the bytes written.

    Yields nothing if the trace ended with an error or has no ops.
    """
    if trace.error is not None or not trace.rows:
        return
    low = short_name(trace.dtype)
    low_flops = work_of(filter(is_low, trace.rows))
    if low_flops:
        share = percent(low_flops, work_of(trace.rows))
        sentence = f"{share} % of the work is done in {low}"
    else:
        sentence = (
            f"Autocast does not speed up this model, because none of its work is done in {low}"
        )
    yield f"{sentence}{_change_in_bytes(trace)}."


def _change_in_bytes(trace: Tracer) -> str:
    """Say how many bytes less the forward pass writes than in fp32; "" if there is no difference.

    The text continues a sentence.
    """
    # Results in 16 bits are smaller, but casts write bytes that fp32 would not.
    saved_bytes = sum(map(_saved_bytes, trace.rows))
    cast_bytes = bytes_of(trace.casts)
    if saved_bytes > cast_bytes:
        bytes_in_fp32 = saved_bytes + bytes_of(trace.rows)
        share = percent(saved_bytes - cast_bytes, bytes_in_fp32)
        return (
            f", and the forward pass writes {share} % fewer bytes than in fp32, including the casts"
        )
    if not cast_bytes:
        return ""
    low = short_name(trace.dtype)
    weight_bytes = bytes_of(weight_casts(trace))
    return (
        f". In this forward pass, {low} does not reduce the bytes written: the casts write "
        f"{bytes_text(cast_bytes)}, but the results are only {bytes_text(saved_bytes)} smaller "
        f"than in fp32. The casts of weights ({bytes_text(weight_bytes)}) do not grow with the "
        "batch"
    )


def _saved_bytes(row: OpRecord) -> int:
    """How many bytes less an op writes than in fp32."""
    saved_bytes = 0
    for shape, dtype in zip(row.out_shapes, row.out_dtypes, strict=True):
        if dtype in LOWER_DTYPES:
            saved_bytes += 2 * math.prod(shape)  # two bytes less for each value
    return saved_bytes


@LAST.under_autocast
def _no_gradient(trace: Tracer) -> Iterator[str]:
    """Report a model that cannot be trained, because its output or loss has no gradient."""
    if trace.without_gradient:
        yield f"The model cannot be trained: {trace.without_gradient}."


@LAST.always
def _backward_not_followed(trace: Tracer) -> Iterator[str]:
    """Report that the X-ray did not trace the backward pass, and the reason."""
    reason = trace.backward_not_followed
    if reason:
        yield (
            f"The X-ray traced only the forward pass, because {reason}. Mixed dtypes in the "
            "backward pass raise an error in training."
        )
