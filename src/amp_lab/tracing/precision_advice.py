"""Find ops in the wrong precision: the loss in 16 bits, large ops in fp32, softmax, norms, …

"Low" means fp16 or bf16; "wide" any other dtype. `advice` says how to add a rule.
"""

from collections.abc import Iterator

import torch

from amp_lab.core.backends import backend
from amp_lab.core.cpu import NO_PRIMITIVE_REMEDY, lstm_error
from amp_lab.core.remedies import remedy
from amp_lab.core.report import bytes_text, dtype_name, short_name
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.tracing.advice_rules import SMALL_SHARE, Rules, group_by_fact, is_low
from amp_lab.tracing.records import LOSS, OpRecord, bytes_of, is_of_loss, work_of
from amp_lab.tracing.running_module import Outputs
from amp_lab.tracing.tracer import NORMS, Tracer

RULES = Rules()

_LARGE_SHARE = 0.05  # of all work or of all bytes written: an op with this share is large

_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}

_LOSS_IN_LOW_PRECISION = remedy(
    "xray.loss_in_low_precision",
    "an op of the loss runs in fp16 or bf16",
    "{where}: {op} {what}. Compute the loss outside autocast, from output.float().",
)
_LOSS_IN_THE_MODEL = remedy(
    "xray.loss_in_the_model",
    "the model computes its loss itself, partly in fp16 or bf16, and also returns logits",
    "{where}: {op} inside the model {what}. Call the model without targets, and compute the "
    "loss outside autocast from its output{place}, cast with .float().",
)
_LOSS_ALONE = remedy(
    "xray.loss_alone",
    "the model computes its loss itself, partly in fp16 or bf16, and returns no logits",
    "{where}: {op} inside the model {what}. Return the inputs of the loss from the model, "
    "and compute the loss outside autocast, from output.float().",
)
_NO_RULE = remedy(
    "xray.no_rule",
    "autocast has no rule for a matmul, such as the grouped_mm of experts, which then runs in fp32",
    "autocast on {device} does not cast the inputs of this call. Cast the operands before the "
    "call with x.to(torch.{dtype}). If the model is from a library, cast weights and inputs once "
    "with model.to(torch.{dtype}), and turn autocast off",
)


@RULES.under_autocast
def _lstm_that_fails_on_this_cpu(trace: Tracer) -> Iterator[str]:
    """Report LSTMs for which this CPU has no kernel in 16 bits; fake tensors do not show that."""
    if trace.device_type != "cpu":
        return
    lstms = [row for row in trace.rows if row.op == "lstm" and is_low(row)]
    # torch chooses the kernel by the dtype of the input before autocast casts it.
    facts = [(row, (row.dtype, row.given_dtype)) for row in lstms if not _is_projected(row)]
    for subject, _, (dtype, input_dtype) in group_by_fact(facts):
        error = lstm_error(dtype, with_gradients=True, input_dtype=input_dtype)
        if error is None:
            continue
        failure = f"{subject} fails in {short_name(dtype)} on this CPU"
        if lstm_error(dtype, with_gradients=False, input_dtype=input_dtype) is None:
            failure += " when it trains"
        yield f"{failure}: torch raises {error!r}. {NO_PRIMITIVE_REMEDY}."


def _is_projected(row: OpRecord) -> bool:
    """Whether an LSTM has projections (`proj_size`), which torch runs without oneDNN."""
    # Weights have two dimensions; the input, always a batch here, and the states three, biases one.
    weight_shapes = [shape for shape in row.in_shapes if len(shape) == 2]
    # Without projections all weights (4 x hidden, …) have the same number of rows.
    row_counts = {shape[0] for shape in weight_shapes}
    return len(row_counts) > 1


@RULES.always
def _loss_in_low_precision(trace: Tracer) -> Iterator[str]:
    """Report ops of the loss that run in 16 bits, in the loss function or inside the model."""
    loss_rows = [row for row in trace.rows if is_of_loss(row)]
    # The same function may run ops in both precisions: log_softmax in bf16, then nll_loss in fp32.
    partly_in_fp32 = {(row.module, row.called) for row in loss_rows if not is_low(row)}
    facts = []
    for row in filter(is_low, loss_rows):
        what = f"runs in {short_name(row.dtype)}, so the loss is computed in low precision"
        if (row.module, row.called) in partly_in_fp32:
            what = (
                f"runs in {short_name(row.dtype)}, so the fp32 loss is computed from "
                "low-precision values"
            )
        is_outside = row.module == LOSS  # in the user's loss function, not inside the model
        place = None if is_outside else _place_of_logits(trace.outputs, row)
        op = row.op.strip("_")  # "_log_softmax" is called log_softmax in the documentation
        facts.append((row, (op, what, is_outside, place)))
    for subject, _, (op, what, is_outside, place) in group_by_fact(facts):
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
    loss_input = row.in_shapes[0]
    if not loss_input:  # a single number
        return None
    paths = []
    for path, (dtype, shape) in outputs.items():
        has_as_many_classes = shape[-1:] == loss_input[-1:]
        if has_as_many_classes and dtype in LOWER_DTYPES:
            paths.append(path)
    paths.sort(key=lambda path: "logits" not in path)  # False comes before True
    return paths[0] if paths else None


@RULES.under_autocast
def _work_not_in_low_precision(trace: Tracer) -> Iterator[str]:
    """Report ops with FLOPs that autocast leaves in a wide dtype, and why; not those with few."""
    wide = [row for row in trace.rows if row.flops and not is_low(row)]
    facts = [(row, (row.dtype, _not_low_reason(row, trace))) for row in wide]
    for subject, rows, (dtype, reason) in group_by_fact(facts):
        share = work_of(rows) / work_of(trace.rows)
        is_untouched = _are_modules_untouched(rows, trace.rows)
        # A whole module that autocast misses is likely a mistake, so a small share is reported too.
        least_share = SMALL_SHARE if is_untouched else _LARGE_SHARE
        if share < least_share:
            continue
        untouched = " autocast does not change it," if is_untouched else ""
        dtype_text = short_name(dtype) if dtype else "integers"
        stays = f"{100 * share:.1f} % of the work stays in {dtype_text}"
        yield f"{subject}:{untouched} {stays}, because {reason}."


def _not_low_reason(row: OpRecord, trace: Tracer) -> str:
    """Say why autocast did not run an op in 16 bits; the text follows "because"."""
    device_type = trace.device_type
    if row.op in backend(device_type).rnns_without_rule:
        return f"autocast on {device_type} has no rule for the layer"
    if not row.autocast:
        return "autocast is disabled there"
    if row.dtype is torch.float64:
        return "autocast does not cast fp64"
    if row.dtype is None or any(dtype.is_complex for dtype in row.in_dtypes):
        return "autocast does not cast complex numbers and integers"
    # "addmm_" is in place, "__matmul__" is not.
    if row.called.endswith("_") and not row.called.endswith("__"):
        return "autocast does not cast for in-place ops"
    return _NO_RULE.sentence(device=device_type, dtype=dtype_name(trace.dtype))


def _are_modules_untouched(wide_rows: list[OpRecord], rows: list[OpRecord]) -> bool:
    """Whether autocast leaves alone the modules of the wide ops: none of their ops has 16 bits.

    False if the ops are in the model's own code or in the loss. `rows` are all ops of the trace.
    """
    modules = {row.module for row in wide_rows} - {"", LOSS}
    if not modules:
        return False
    for row in rows:
        dtypes = {*row.in_dtypes, *row.out_dtypes}
        if row.module in modules and dtypes.intersection(LOWER_DTYPES):
            return False
    return True


@RULES.under_autocast
def _large_ops_in_fp32(trace: Tracer) -> Iterator[str]:
    """Report functions besides matmuls that autocast runs in fp32, if they write many bytes."""
    all_bytes = bytes_of(trace.rows)
    widened = [row for row in trace.rows if row.widened and not row.flops]
    # Grouped by the function alone.
    facts = [(row, None) for row in widened if row.dtype is torch.float32]
    for subject, rows, _ in group_by_fact(facts):
        size = bytes_of(rows)
        if size == 0 or size < _LARGE_SHARE * all_bytes:  # 0: an empty batch
            continue
        yield (
            f"{subject} stays in fp32, because autocast on {trace.device_type} runs it in fp32. "
            f"It writes {bytes_text(size)}, {100 * size / all_bytes:.0f} % of all bytes."
        )


@RULES.under_autocast
def _rounded_softmax_and_norms(trace: Tracer) -> Iterator[str]:
    """Report softmax and norms that round their input and output to 16 bits."""
    facts = []
    for row in trace.rows:
        is_softmax_or_norm = row.op in _SOFTMAX or row.op in NORMS
        if not is_softmax_or_norm or not is_low(row):
            continue
        if is_of_loss(row):  # `_loss_in_low_precision` reports it
            continue
        # On CUDA a softmax may take low precision and return fp32, which rounds nothing.
        if set(row.out_dtypes).issubset(LOWER_DTYPES):
            facts.append((row, row.dtype))
    for subject, _, dtype in group_by_fact(facts):
        runs = f"{subject} runs in {short_name(dtype)} on {trace.device_type}"
        yield f"{runs}, so its input and output are rounded to {short_name(dtype)}."


@RULES.under_autocast
def _casts_to_fp32_and_back(trace: Tracer) -> Iterator[str]:
    """Report ops between two casts: to fp32 for the op, back to 16 bits for the next function."""
    low = short_name(trace.dtype)
    for subject, _, next_function in group_by_fact(trace.bounces):
        yield (
            f"{subject}: autocast casts the input from {low} to fp32, and then the output back to "
            f"{low} for {next_function}."
        )
