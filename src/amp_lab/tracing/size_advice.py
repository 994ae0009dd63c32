"""Which sizes of matmuls and convolutions do not fill the tiles of matrix units?

`advice` says how to add a rule.
"""

from collections.abc import Iterator

from amp_lab.core.backends import backend
from amp_lab.core.remedies import remedy
from amp_lab.core.report import percent
from amp_lab.tracing.advice_rules import SMALL_SHARE, Rules, group_by_fact, is_low
from amp_lab.tracing.records import OpRecord, work_of
from amp_lab.tracing.tracer import Tracer

RULES = Rules()

_ROWS_OF_THE_INPUT = remedy(
    "xray.rows_of_the_input",
    "a number of rows, which is batch x tokens, is no multiple of 8",
    "Numbers of rows come from this input, as its batch x tokens, and not from the model: give "
    "the input that you will train with.",
    failure="AMP0044",
)


@RULES.under_autocast
def _sizes_that_do_not_fill_tiles(trace: Tracer) -> Iterator[str]:
    """Report 16-bit matmuls and convolutions with sizes not multiples of 8, but no small ones."""
    work = work_of(trace.rows)
    large = [row for row in trace.rows if row.flops > SMALL_SHARE * work and is_low(row)]
    rows = list(filter(_sizes_not_multiples_of_8, large))
    rows.sort(key=lambda row: row.flops, reverse=True)
    if not rows or backend(trace.device_type).is_host:  # a CPU has no such tiles
        return
    facts = [(row, _sizes_not_multiples_of_8(row)) for row in rows]
    texts = [f"{subject}: {sizes}" for subject, _, sizes in group_by_fact(facts)]
    shown = "; ".join(texts[:3])  # those with the most FLOPs; `share` is that of all `rows`
    advice = f". {_ROWS_OF_THE_INPUT.text}" if " rows" in shown else "."
    if len(texts) > 3:
        shown += f"; and {len(texts) - 3} more"
    share = percent(work_of(rows), work)
    yield (
        f"Matrix units take multiples of 8, but not so the sizes of {share} % of the work: "
        f"{shown}{advice}"
    )


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
