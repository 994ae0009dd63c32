"""The speed ladder: time workloads in each precision, with one optimization after another.

An optimization is called a rung. Each time is compared with the roofline of the device.
"""

from amp_lab.bench.comparison import BenchComparison
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.limits import count_step, measure_ceilings
from amp_lab.bench.results_file import load_results
from amp_lab.bench.rungs import RUNGS
from amp_lab.bench.runner import run_bench
from amp_lab.bench.tiled_convmodel import TiledStep, tiled_unsupported_reason
from amp_lab.bench.workloads import WORKLOADS

__all__ = [
    "RUNGS",
    "WORKLOADS",
    "BenchComparison",
    "ConvModel",
    "FusedStep",
    "TiledStep",
    "count_step",
    "load_results",
    "measure_ceilings",
    "quantized_sine",
    "run_bench",
    "tiled_unsupported_reason",
]
