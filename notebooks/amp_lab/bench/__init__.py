"""The speed ladder: workloads x precisions x rungs, held against what the device can do."""

from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.limits import Ceilings, Count, count_step, measure_ceilings
from amp_lab.bench.results import (
    Compared,
    PeerRow,
    Results,
    Row,
    compare_results,
    load_results,
)
from amp_lab.bench.rungs import RUNGS, make_step, rungs_of
from amp_lab.bench.runner import run_bench
from amp_lab.bench.workloads import (
    NAMES,
    Workload,
    classifier_workload,
    convmodel_workload,
    gpt_workload,
    product_workload,
    workloads,
)

__all__ = [
    "NAMES",
    "RUNGS",
    "Ceilings",
    "Compared",
    "ConvModel",
    "Count",
    "FusedStep",
    "PeerRow",
    "Results",
    "Row",
    "Workload",
    "classifier_workload",
    "compare_results",
    "convmodel_workload",
    "count_step",
    "gpt_workload",
    "load_results",
    "make_step",
    "measure_ceilings",
    "product_workload",
    "quantized_sine",
    "run_bench",
    "rungs_of",
    "workloads",
]
