"""The remarks of an X-ray: softmax and norms in 16 bits, casts, sizes that waste tiles, …

A rule is a function that takes the trace and yields sentences; it yields none if it does not apply.
To add one, write it here with `_rule` above it, at the place of its remarks among the others.
"Low" means fp16 or bf16; "wide" any other dtype.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from amp_lab.core.backends import backend
from amp_lab.core.cpu import NO_PRIMITIVE_REMEDY, lstm_error
from amp_lab.core.remedies import remedy
from amp_lab.core.report import bytes_text, dtype_name, listed, percent, short_name
from amp_lab.core.tensors import LOWER_DTYPES, largest_integer
from amp_lab.tracing.records import (
    LOSS,
    Cast,
    OpRecord,
    bytes_of,
    is_of_loss,
    place_of,
    places_of,
    work_of,
)
from amp_lab.tracing.running_module import Outputs
from amp_lab.tracing.tracer import NORMS, Tracer

LARGE_SHARE = 0.05  # of all work or of all bytes written: an op with this share is large
_SMALL_SHARE = 0.01  # of all work: ops with a smaller share are not reported

_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}

_LOSS_IN_LOW_PRECISION = remedy(
    "xray.loss_in_low_precision",
    "an op of the loss runs in fp16 or bf16",
    "{where}: its {op} {what}: compute the loss outside autocast, from output.float().",
)
_LOSS_IN_THE_MODEL = remedy(
    "xray.loss_in_the_model",
    "an op of a loss that the model itself computes runs in fp16 or bf16, and it returns logits",
    "{where}: its {op} {what}, inside the model: call the model without targets, and compute the "
    "loss outside autocast from its output{place}, cast by .float().",
)
_LOSS_ALONE = remedy(
    "xray.loss_alone",
    "an op of a loss that the model itself computes runs in fp16 or bf16, and it returns no logits",
    "{where}: its {op} {what}, inside the model: let the model return what the loss is computed "
    "from, and compute the loss outside autocast, from output.float().",
)
_NO_RULE = remedy(
    "xray.no_rule",
    "autocast has no rule for a matmul, such as grouped_mm of experts, and leaves it in fp32",
    "autocast on {device} has no rule that casts this call: cast its operands where it is called, "
    "x.to(torch.{dtype}), or, in a library's model, cast weights and inputs once, "
    "model.to(torch.{dtype}), and leave autocast off",
)
_ROWS_OF_THE_INPUT = remedy(
    "xray.rows_of_the_input",
    "a number of rows, which is batch x tokens, is no multiple of 8",
    "Numbers of rows come from this input, as its batch x tokens, and not from the model: give "
    "the input that you will train with.",
    failure="AMP0044",
)
_FROZEN = remedy(
    "xray.frozen",
    "no parameter of a model requires a gradient, so that autocast casts all weights in each call",
    "No parameter requires a gradient, so autocast keeps no cast of a weight: each use casts it "
    "anew, {size} in this forward pass. Cast weights and inputs once, model.to(torch.{dtype}), and "
    "leave autocast off.",
    failure="AMP0033",
)
_OTHER_HALF = remedy(
    "xray.other_half",
    "autocast casts weights from one 16-bit format to the other",
    "Autocast casts weights in {own} to {low}, {loss}: give autocast dtype=torch.{dtype}, or keep "
    "the weights in fp32, model.float().",
    failure="AMP0021",
)
# What autocast loses when it casts weights from the other 16-bit format to this one.
_LOSS_OF_CAST = {
    torch.float16: "which makes those above 65504 inf and small ones 0",
    torch.bfloat16: "which leaves them 8 bits",
}
_INTEGERS = remedy(
    "xray.integers",
    "autocast casts whole numbers to 16 bits, such as positions of tokens",
    "{called} in {where}: autocast casts whole numbers to {low}, which has all of them only up to "
    "{most:,}. If they are positions or counts that can be larger, compute this in fp32: "
    "with torch.autocast({device!r}, enabled=False).",
    failure="AMP0030",
)
_MIXED_OP = remedy(
    "xray.mixed_op",
    "an op that is not torch's gets fp32 and 16 bits under autocast, which has no rule for it",
    "{op} in {where} gets {mixed}: autocast has no rule for the op and casts none of them. If its "
    "kernel takes one dtype alone, as that of flash attention does, cast them before the call, "
    "{casts}; or give autocast a rule, torch.library.register_autocast({op!r}, {device!r}, "
    "torch.{dtype}); or, if an autograd.Function calls the op, write above its forward "
    "@torch.amp.custom_fwd(device_type={device!r}, cast_inputs=torch.{dtype}) and above its "
    "backward @torch.amp.custom_bwd(device_type={device!r}).",
    failure="AMP0078",
)


Rule = Callable[[Tracer], Iterator[str]]
RULES: list[Rule] = []
"""All rules, in the order of their remarks."""
_WITHOUT_AUTOCAST: list[Rule] = []  # those that apply to a trace without autocast too


def _rule(rule: Rule) -> Rule:
    """Add a rule to those that apply under autocast."""
    RULES.append(rule)
    return rule


def _rule_without_autocast(rule: Rule) -> Rule:
    """Add a rule to those that apply to any trace."""
    _WITHOUT_AUTOCAST.append(rule)
    return _rule(rule)


def advise(trace: Tracer, raised: str | None) -> list[str]:
    """Return the remarks on a trace as sentences.

    `raised` describes an error that only occurs under autocast; None if there is none.
    """
    lines = []
    if raised is not None:
        lines.append(f"Only under autocast: {raised}. The table ends there.")
    # A trace without autocast has the dtype float32.
    rules = RULES if trace.dtype in LOWER_DTYPES else _WITHOUT_AUTOCAST
    for rule in rules:
        lines += rule(trace)
    return lines


@_rule
def _verdict(trace: Tracer) -> Iterator[str]:
    """Summarize what autocast saves: the share of work in 16 bits, and the bytes written.

    Yields nothing if the trace ended with an error or has no ops.
    """
    if trace.error is not None or not trace.rows:
        return
    low = short_name(trace.dtype)
    work = f"Autocast does not speed this model up: none of its work is done in {low}"
    low_work = work_of(filter(_is_low, trace.rows))
    if low_work:
        work = f"{percent(low_work, work_of(trace.rows))} % of the work is done in {low}"
    yield f"{work}{_change_in_bytes(trace)}."


def _change_in_bytes(trace: Tracer) -> str:
    """Compare the bytes that the forward pass writes with fp32; "" if there is no difference.

    The text continues a sentence.
    """
    # Casts write bytes that fp32 would not, and may outweigh what smaller results save.
    saved_bytes = sum(map(_saved_bytes, trace.rows))
    cast_bytes = bytes_of(trace.casts)
    if saved_bytes > cast_bytes:
        bytes_in_fp32 = saved_bytes + bytes_of(trace.rows)
        share = percent(saved_bytes - cast_bytes, bytes_in_fp32)
        return f"; the forward pass writes {share} % less than in fp32, the casts included"
    if not cast_bytes:
        return ""
    low = short_name(trace.dtype)
    weight_bytes = bytes_of(_weight_casts(trace))
    return (
        f"; in bytes {low} saves nothing in this forward pass: casts write "
        f"{bytes_text(cast_bytes)} ({bytes_text(weight_bytes)} for weights, with any batch), and "
        f"results take only {bytes_text(saved_bytes)} less than in fp32"
    )


def _saved_bytes(row: OpRecord) -> int:
    """How many bytes less an op writes than in fp32: two for each value in 16 bits."""
    results = zip(row.out_shapes, row.out_dtypes, strict=True)
    return sum(2 * math.prod(shape) for shape, dtype in results if dtype in LOWER_DTYPES)


@_rule
def _lstm_that_fails_on_this_cpu(trace: Tracer) -> Iterator[str]:
    """Report LSTMs for which this CPU has no kernel in 16 bits; fake tensors do not show that."""
    if trace.device_type != "cpu":
        return
    lstms = [row for row in trace.rows if row.op == "lstm" and _is_low(row)]
    # torch chooses the kernel by the dtype of the input before autocast casts it.
    facts = [(row, (row.dtype, row.given_dtype)) for row in lstms if not _is_projected(row)]
    for subject, _, (dtype, given_dtype) in _group_by_fact(facts):
        error = lstm_error(dtype, with_gradients=True, input_dtype=given_dtype)
        if error is None:
            continue
        failure = f"{subject} fails in {short_name(dtype)} on this CPU"
        if lstm_error(dtype, with_gradients=False, input_dtype=given_dtype) is None:
            failure += " when it trains"
        yield f"{failure}: torch raises {error!r}. {NO_PRIMITIVE_REMEDY}."


def _is_projected(row: OpRecord) -> bool:
    """Whether an LSTM has projections (`proj_size`), which torch runs without oneDNN."""
    # Weights have two dimensions; the input, always a batch here, and the states three, biases one.
    weights = [shape for shape in row.in_shapes if len(shape) == 2]
    # Without projections all weights (4 x hidden, …) have the same number of rows.
    return len({shape[0] for shape in weights}) > 1


@_rule_without_autocast
def _loss_in_low_precision(trace: Tracer) -> Iterator[str]:
    """Report ops of the loss that run in 16 bits, in the loss function or inside the model."""
    loss_rows = [row for row in trace.rows if is_of_loss(row)]
    # The same function may run ops in both precisions: log_softmax in bf16, then nll_loss in fp32.
    partly_in_fp32 = {(row.module, row.called) for row in loss_rows if not _is_low(row)}
    facts = []
    for row in filter(_is_low, loss_rows):
        what = f"runs in {short_name(row.dtype)}, so the loss is computed in low precision"
        if (row.module, row.called) in partly_in_fp32:
            what = f"runs in {short_name(row.dtype)}, and the fp32 loss is computed from that"
        is_outside = row.module == LOSS  # in the user's loss function, not inside the model
        place = None if is_outside else _place_of_logits(trace.outputs, row)
        op = row.op.strip("_")  # "_log_softmax" is called log_softmax in the documentation
        facts.append((row, (op, what, is_outside, place)))
    for subject, _, (op, what, is_outside, place) in _group_by_fact(facts):
        if is_outside:
            yield _LOSS_IN_LOW_PRECISION.sentence(where=subject, op=op, what=what)
        elif place is None:
            yield _LOSS_ALONE.sentence(where=subject, op=op, what=what)
        else:
            quoted = f" {place!r}" if place else ""
            yield _LOSS_IN_THE_MODEL.sentence(where=subject, op=op, what=what, place=quoted)


def _place_of_logits(outputs: Outputs, row: OpRecord) -> str | None:
    """The path of a loss's logits in the model's output, such as "logits"; None if not found.

    "" if the output is the logits themselves. `row` is the op of the loss. Logits are in 16 bits,
    and as long in the last dimension as the input of the op. Paths with "logits" come first.
    """
    classes = row.in_shapes[0][-1:]  # (number of classes,), or () for a single number
    candidates = [
        place
        for place, (dtype, shape) in outputs.items()
        if classes and shape[-1:] == classes and dtype in LOWER_DTYPES
    ]
    candidates.sort(key=lambda place: "logits" not in place)
    return next(iter(candidates), None)


@_rule
def _work_not_in_low_precision(trace: Tracer) -> Iterator[str]:
    """Report ops with FLOPs that autocast leaves in a wide dtype, and why; not those with few."""
    wide = [row for row in trace.rows if row.flops and not _is_low(row)]
    facts = [(row, (row.dtype, _not_low_reason(row, trace))) for row in wide]
    for subject, rows, (dtype, reason) in _group_by_fact(facts):
        share = work_of(rows) / work_of(trace.rows)
        is_untouched = _autocast_does_nothing_near(rows, trace.rows)
        # A whole module that autocast misses is likely a mistake, so a small share is reported too.
        least_share = _SMALL_SHARE if is_untouched else LARGE_SHARE
        if share < least_share:
            continue
        untouched = " autocast leaves it untouched," if is_untouched else ""
        dtype_text = short_name(dtype) if dtype else "complex numbers or integers"
        stays = f"{100 * share:.1f} % of the work stays in {dtype_text}"
        yield f"{subject}:{untouched} {stays}, because {reason}."


@_rule
def _large_ops_in_fp32(trace: Tracer) -> Iterator[str]:
    """Report functions besides matmuls that autocast runs in fp32, if they write many bytes."""
    written = bytes_of(trace.rows)
    widened = [row for row in trace.rows if row.widened and not row.flops]
    # Grouped by the function alone.
    facts = [(row, None) for row in widened if row.dtype is torch.float32]
    for subject, rows, _ in _group_by_fact(facts):
        size = bytes_of(rows)
        if size == 0 or size < LARGE_SHARE * written:  # 0: an empty batch
            continue
        yield (
            f"{subject} stays in fp32, because autocast on {trace.device_type} runs it so: it "
            f"writes {bytes_text(size)}, {100 * size / written:.0f} % of all."
        )


@_rule
def _rounded_softmax_and_norms(trace: Tracer) -> Iterator[str]:
    """Report softmax and norms that round their input and output to 16 bits."""
    facts = []
    for row in trace.rows:
        # The loss has a remark of its own.
        if row.op not in _SOFTMAX | NORMS or not _is_low(row) or is_of_loss(row):
            continue
        # On CUDA a softmax may take low precision and return fp32, which rounds nothing.
        if set(row.out_dtypes).issubset(LOWER_DTYPES):
            facts.append((row, row.dtype))
    for subject, _, dtype in _group_by_fact(facts):
        runs = f"{subject} runs in {short_name(dtype)} on {trace.device_type}"
        yield f"{runs}: its input and its output are rounded to it."


@_rule
def _casts_to_fp32_and_back(trace: Tracer) -> Iterator[str]:
    """Report ops between two casts: to fp32 for the op, back to 16 bits for the next function."""
    low = short_name(trace.dtype)
    for subject, _, next_function in _group_by_fact(trace.bounces):
        yield (
            f"{subject}: autocast takes its input from {low} to fp32, and its output back to {low} "
            f"for {next_function}."
        )


@_rule
def _sizes_that_do_not_fill_tiles(trace: Tracer) -> Iterator[str]:
    """Report 16-bit matmuls and convolutions with sizes not multiples of 8, but no small ones."""
    work = work_of(trace.rows)
    large = [row for row in trace.rows if row.flops > _SMALL_SHARE * work and _is_low(row)]
    rows = list(filter(_sizes_not_multiples_of_8, large))
    rows.sort(key=lambda row: row.flops, reverse=True)
    if not rows or backend(trace.device_type).is_host:  # a CPU has no such tiles
        return
    facts = [(row, _sizes_not_multiples_of_8(row)) for row in rows]
    texts = [f"{subject}: {sizes}" for subject, _, sizes in _group_by_fact(facts)]
    shown = "; ".join(texts[:3])  # those with the most FLOPs; `share` is that of all `rows`
    advice = f". {_ROWS_OF_THE_INPUT.text}" if " rows" in shown else "."
    if len(texts) > 3:
        shown += f"; and {len(texts) - 3} more"
    share = percent(work_of(rows), work)
    yield (
        f"Matrix units take multiples of 8, but not so the sizes of {share} % of the work: "
        f"{shown}{advice}"
    )


@_rule
def _parameters_cast_at_each_use(trace: Tracer) -> Iterator[str]:
    """Report parameters that autocast casts several times, because it does not cache the cast."""
    uncached = [cast for cast in _weight_casts(trace) if not cast.cached]
    uses = Counter((cast.what, cast.to_dtype) for cast in uncached)
    # `cast.what` is "parameter head.weight".
    repeated = [what.removeprefix("parameter ") for (what, _), n in uses.items() if n > 1]
    if repeated:
        yield (
            f"{listed(repeated, 3)}: cast again for each use, up to {max(uses.values())} times; "
            "autocast caches only whole parameters in fp32 that require a gradient."
        )


def _weight_casts(trace: Tracer) -> list[Cast]:
    return [cast for cast in trace.casts if cast.is_of_parameter]


@_rule
def _frozen_model(trace: Tracer) -> Iterator[str]:
    """Report a model without trainable parameters, whose weights autocast casts at each use."""
    casts = _weight_casts(trace)
    if trace.is_frozen and casts:
        yield _FROZEN.sentence(size=bytes_text(bytes_of(casts)), dtype=dtype_name(trace.dtype))


@_rule
def _weights_in_the_other_16_bit_format(trace: Tracer) -> Iterator[str]:
    """Report weights in bf16 that autocast casts to fp16, or the other way round."""
    weight_dtypes = {cast.from_dtype for cast in _weight_casts(trace)}
    for dtype in weight_dtypes.intersection(LOWER_DTYPES) - {trace.dtype}:  # at most one
        yield _OTHER_HALF.sentence(
            own=short_name(dtype),
            low=short_name(trace.dtype),
            loss=_LOSS_OF_CAST[trace.dtype],
            dtype=dtype_name(dtype),
        )


@_rule
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


@_rule
def _ops_with_mixed_dtypes(trace: Tracer) -> Iterator[str]:
    """Report custom ops that get fp32 and 16-bit tensors, since autocast has no rule for them."""
    dtype = dtype_name(trace.dtype)
    for call, modules in trace.mixed.items():
        mixed = []
        casts = []
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


@_rule
def _no_gradient(trace: Tracer) -> Iterator[str]:
    """Report a model that cannot be trained, because its output or loss has no gradient."""
    if trace.without_gradient:
        yield f"The model cannot be trained: {trace.without_gradient}."


@_rule_without_autocast
def _backward_not_followed(trace: Tracer) -> Iterator[str]:
    """Report that the backward pass was not followed, and the reason."""
    reason = trace.backward_not_followed
    if reason:
        yield f"Only the forward pass was followed: {reason}. Mixed dtypes there raise in training."


def _is_low(row: OpRecord) -> bool:
    return row.dtype in LOWER_DTYPES


def _group_by_fact(
    pairs: Iterable[tuple[OpRecord, Any]],
) -> Iterator[tuple[str, list[OpRecord], Any]]:
    """Group rows with the same function and the same fact; groups are in the order of first rows.

    Yields the subject of a sentence, such as ``linear in 'a', 'b'``, the rows, and the fact. A fact
    is any value that can be hashed.
    """
    groups: dict[tuple[str, Any], list[OpRecord]] = defaultdict(list)
    for row, fact in pairs:
        groups[row.called, fact].append(row)
    for (called, fact), rows in groups.items():
        yield f"{called} in {places_of(rows)}", rows, fact


def _not_low_reason(row: OpRecord, trace: Tracer) -> str:
    """Say why autocast did not run an op in 16 bits; the text follows "because"."""
    device_type = trace.device_type
    if row.op in backend(device_type).rnns_without_rule:
        return f"autocast on {device_type} has no rule for the layer"
    if not row.autocast:
        return "autocast is switched off there"
    if row.dtype is torch.float64:
        return "autocast leaves fp64 alone"
    if row.dtype is None:
        return "autocast leaves alone what is no floating-point number"
    # "addmm_" is in place, "__matmul__" is not.
    if row.called.endswith("_") and not row.called.endswith("__"):
        return "autocast does not cast for in-place ops"
    return _NO_RULE.sentence(device=device_type, dtype=dtype_name(trace.dtype))


def _autocast_does_nothing_near(wide_rows: list[OpRecord], rows: list[OpRecord]) -> bool:
    """Whether no op in the modules of the wide ops has 16 bits; False if they are in no module."""
    # The model itself and the loss are no modules that autocast could miss as a whole.
    modules = {row.module for row in wide_rows} - {"", LOSS}
    near = [row for row in rows if row.module in modules]
    has_low = any(not set(LOWER_DTYPES).isdisjoint(row.in_dtypes + row.out_dtypes) for row in near)
    return bool(modules) and not has_low


def _sizes_not_multiples_of_8(row: OpRecord) -> str:
    """The sizes of a matmul or convolution that are not multiples of 8: "10 output features".

    "" if all of them are, and for other ops.
    """
    sizes = {}
    if row.op == "convolution":
        image, weight = row.in_shapes[:2]  # (N, C, …), (output channels, C per group, …)
        is_depthwise = weight[1] == 1 and image[1] > 1
        if is_depthwise:
            return "1 channel for each group (depthwise)"
        sizes = {"input channels": image[1], "output channels": row.out_shapes[0][1]}
    elif row.op in ("mm", "addmm"):
        left, right = row.in_shapes[-2:]  # (rows, inner), (inner, columns), after addmm's bias
        sizes = {"input features": right[0], "output features": right[1]}
        if left[0] > 8:  # with fewer rows it is the batch that is small
            sizes["rows"] = left[0]
    elif row.op in ("bmm", "baddbmm"):
        left, right = row.in_shapes[-2:]  # with a batch in front
        sizes = {"rows": left[1], "inner size": left[2], "columns": right[2]}
    return ", ".join(f"{size:,} {what}" for what, size in sizes.items() if size % 8)
