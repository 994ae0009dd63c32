"""Find sizes of matmuls and convolutions that do not fill the tiles of matrix units.

`advice` says how to add a rule.
"""

from collections.abc import Iterator

from amp_lab.core.backends import backend
from amp_lab.core.remedies import remedy
from amp_lab.core.report import percent
from amp_lab.tracing.advice_rules import SMALL_SHARE, Rules, group_by_fact, is_low
from amp_lab.tracing.records import sizes_not_multiples_of_8, work_of
from amp_lab.tracing.tracer import Tracer

RULES = Rules()

_ROWS_OF_THE_INPUT = remedy(
    "xray.rows_of_the_input",
    "a number of rows (batch x tokens) is not a multiple of 8",
    "The number of rows is the batch x tokens of this input, not a size of the model. Give the "
    "input that you will train with.",
    failure="AMP0044",
)


@RULES.under_autocast
def _sizes_that_do_not_fill_tiles(trace: Tracer) -> Iterator[str]:
    """Report 16-bit matmuls and convolutions with sizes not multiples of 8, but no small ones."""
    if backend(trace.device_type).is_host:  # a CPU has no such tiles
        return
    total_flops = work_of(trace.rows)
    large = [row for row in trace.rows if row.flops > SMALL_SHARE * total_flops and is_low(row)]
    misfits = [row for row in large if sizes_not_multiples_of_8(row)]
    if not misfits:
        return
    misfits.sort(key=lambda row: row.flops, reverse=True)
    facts = [(row, sizes_not_multiples_of_8(row)) for row in misfits]
    texts = [f"{subject}: {sizes}" for subject, _, sizes in group_by_fact(facts)]
    shown = "; ".join(texts[:3])  # those with the most FLOPs
    has_rows = " rows" in shown  # such as ``10 rows``, a size that the input gives
    if len(texts) > 3:
        shown += f"; and {len(texts) - 3} more"
    share = percent(work_of(misfits), total_flops)
    sentence = (
        f"Matrix units are fastest with multiples of 8. {share} % of the work has other sizes"
    )
    advice = f" {_ROWS_OF_THE_INPUT.text}" if has_rows else ""
    yield f"{sentence}: {shown}.{advice}"
