"""Trace a model for a device that need not be in this machine.

Import `xray`, `op_table`, `forecast_memory` and `largest_batch` from `amp_lab`.
"""

from amp_lab.tracing.memory import compare_memory
from amp_lab.tracing.memory_arguments import parse_bytes
from amp_lab.tracing.op_table import differences
from amp_lab.tracing.xray_result import compare_xrays

__all__ = ["compare_memory", "compare_xrays", "differences", "parse_bytes"]
