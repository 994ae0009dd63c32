"""What an X-ray advises to look at: a rule for each kind of finding, in the order of `RULES`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch

from amp_lab.backends import backend
from amp_lab.report import bytes_text, listed, short_name
from amp_lab.tracing.fake_device import LOWER_DTYPES
from amp_lab.tracing.records import LOSS, OpRecord, Trace, places_of
from amp_lab.tracing.tracer import NORMS

LARGE = 0.05
"""An op is large if it has this share of all work, or of all bytes written."""

_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax")
_LOSSES = {
    "nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "mse_loss", "huber_loss",
    "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "_ctc_loss",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward",
}  # fmt: skip
_REDUCTIONS = ("mean", "sum", "norm", "linalg_vector_norm")


def advise(trace: Trace, raised: str | None) -> list[str]:
    """Sentences on what a trace under autocast shows; `raised` is what autocast made fail."""
    advice = []
    if raised is not None:
        tip = ""
        if "are unsafe to autocast" in str(trace.error):
            tip = "; take binary_cross_entropy_with_logits, on logits"
        advice.append(f"Only under autocast: {raised}{tip}. The table ends there.")
    for rule in RULES:
        advice += rule(trace)
    return advice


def _loss_in_low_precision(trace: Trace) -> list[str]:
    rows = [row for row in trace.rows if _is_low(row) and _is_of_loss(row)]
    groups = _grouped(rows, lambda row: (row.called, row.op, row.dtype))
    return [
        f"{called} in {places_of(rows)}: its {op.strip('_')} runs in {short_name(dtype)}, so the "
        "loss is computed in low precision; give it output.float()."
        for (called, op, dtype), rows in groups.items()
    ]


def _is_of_loss(row: OpRecord) -> bool:
    if row.op in _LOSSES or (row.op == "_log_softmax" and "cross_entropy" in row.called):
        return True
    return row.module == LOSS and row.op in _REDUCTIONS


def _no_work_in_low_precision(trace: Trace) -> list[str]:
    work = [row for row in trace.rows if row.flops]
    if not work or any(_is_low(row) for row in work):
        return []
    low = short_name(trace.dtype)
    return [f"Autocast does not speed this model up: none of its work is done in {low}."]


def _work_left_wide(trace: Trace) -> list[str]:
    work = sum(row.flops for row in trace.rows)
    wide = [row for row in trace.rows if row.flops and not _is_low(row)]
    groups = _grouped(wide, lambda row: (row.called, row.dtype, _why_wide(row, trace.device_type)))
    advice = []
    for (called, dtype, why), rows in groups.items():
        share = sum(row.flops for row in rows) / work
        untouched = _is_untouched(rows, trace.rows)
        if untouched or share >= LARGE:
            what = " autocast leaves it untouched," if untouched else ""
            advice.append(
                f"{called} in {places_of(rows)}:{what} {100 * share:.1f} % of the work stays in "
                f"{short_name(dtype)}, because {why}."
            )
    return advice


def _why_wide(row: OpRecord, device_type: str) -> str:
    if row.op in backend(device_type).rnns_without_rule:
        return f"autocast on {device_type} has no rule for the layer"
    if not row.autocast:
        return "autocast is switched off there"
    if row.dtype is torch.float64:
        return "autocast leaves fp64 alone"
    if row.called.endswith("_") and not row.called.endswith("__"):
        return "autocast does not cast for in-place ops"
    return f"autocast on {device_type} has no rule that casts this call"


def _is_untouched(found: list[OpRecord], rows: list[OpRecord]) -> bool:
    """Whether nothing in the modules of the ops that were found is in low precision."""
    modules = {row.module for row in found} - {"", LOSS}
    inside = [row for row in rows if row.module in modules]
    dtypes = {dtype for row in inside for dtype in row.in_dtypes + row.out_dtypes}
    return bool(modules) and dtypes.isdisjoint(LOWER_DTYPES)


def _large_op_in_fp32(trace: Trace) -> list[str]:
    written = sum(row.nbytes for row in trace.rows)
    kept = [
        row for row in trace.rows if row.widened and not row.flops and row.dtype is torch.float32
    ]
    advice = []
    for called, rows in _grouped(kept, lambda row: row.called).items():
        size = sum(row.nbytes for row in rows)
        if size >= LARGE * written:
            advice.append(
                f"{called} in {places_of(rows)} stays in fp32, because autocast on "
                f"{trace.device_type} runs it so: it writes {bytes_text(size)}, "
                f"{100 * size / written:.0f} % of all."
            )
    return advice


def _rounded_softmax_and_norms(trace: Trace) -> list[str]:
    rounded = [
        row
        for row in trace.rows
        if (row.op in _SOFTMAX or row.op in NORMS)
        and _is_low(row)
        and all(dtype in LOWER_DTYPES for dtype in row.out_dtypes)
    ]
    return [
        f"{called} in {places_of(rows)} runs in {short_name(dtype)} on {trace.device_type}: its "
        "input and its output are rounded to it."
        for (called, dtype), rows in _grouped(rounded, lambda r: (r.called, r.dtype)).items()
    ]


def _cast_there_and_back(trace: Trace) -> list[str]:
    low, groups = short_name(trace.dtype), defaultdict(list)
    for row, wanted_by in trace.bounces:
        groups[row.called, wanted_by].append(row)
    return [
        f"{called} in {places_of(rows)}: autocast takes its input from {low} to fp32, and its "
        f"output back to {low} for {wanted_by}."
        for (called, wanted_by), rows in groups.items()
    ]


def _sizes_of_no_whole_tile(trace: Trace) -> list[str]:
    if backend(trace.device_type).is_host:
        return []
    work = sum(row.flops for row in trace.rows)
    groups = defaultdict(list)
    for row in trace.rows:
        if row.flops and _is_low(row):
            problems = _odd_sizes(row, is_large=row.flops >= 0.01 * work)
            if problems:
                groups[row.called, ", ".join(problems)].append(row)
    return [
        f"{called} in {places_of(rows)}: {problems}; matrix units take multiples of 8."
        for (called, problems), rows in groups.items()
    ]


def _odd_sizes(row: OpRecord, is_large: bool) -> list[str]:
    """The sizes of a product that are no multiples of 8; those of a batch, if it is large."""
    sizes = {}
    if row.op == "convolution":
        image, weight = row.in_shapes[:2]  # (N, C, …), (output channels, C per group, …)
        if weight[1] == 1 < image[1]:
            return ["1 channel for each group (depthwise)"]
        sizes = {"input channels": image[1], "output channels": row.out_shapes[0][1]}
    elif row.op in ("mm", "addmm"):
        left, right = row.in_shapes[-2:]
        sizes = {"input features": right[0], "output features": right[1]}
        if is_large and left[0] > 8:
            sizes["rows"] = left[0]
    elif row.op in ("bmm", "baddbmm") and is_large:
        left, right = row.in_shapes[-2:]
        sizes = {"rows": left[1], "inner size": left[2], "columns": right[2]}
    return [f"{size:,} {what}" for what, size in sizes.items() if size % 8]


def _parameters_cast_anew(trace: Trace) -> list[str]:
    uncached = [cast for cast in trace.casts if cast.is_of_parameter and not cast.cached]
    uses = Counter((cast.what, cast.to_dtype) for cast in uncached)
    repeated = [what.removeprefix("parameter ") for (what, _), n in uses.items() if n > 1]
    if not repeated:
        return []
    return [
        f"{listed(repeated, 3)}: cast anew for each use, up to {max(uses.values())} times; "
        "autocast caches only whole parameters in fp32 that require a gradient."
    ]


RULES: tuple[Callable[[Trace], list[str]], ...] = (
    _loss_in_low_precision,
    _no_work_in_low_precision,
    _work_left_wide,
    _large_op_in_fp32,
    _rounded_softmax_and_norms,
    _cast_there_and_back,
    _sizes_of_no_whole_tile,
    _parameters_cast_anew,
)
"""Each makes its sentences of a trace, none if there is nothing to say. A new kind is a new one."""


def _is_low(row: OpRecord) -> bool:
    return row.dtype in LOWER_DTYPES


def _grouped(rows: Iterable[OpRecord], key: Callable) -> dict[object, list[OpRecord]]:
    """The rows by what `key` says of them, in the order of the first of each group."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups
