"""Workloads that take milliseconds: one of each kind that `amp-lab bench` has."""

from amp_lab.bench.workloads import (
    classifier_workload,
    convmodel_workload,
    gpt_workload,
    matmul_workload,
)

TRAINING = convmodel_workload(8, hidden=8)
INFERENCE = convmodel_workload(8, hidden=8, kind="inference")
CLASSIFIER = classifier_workload("squeezenet1_1", 2, 32)
GPT = gpt_workload(2, 8, width=16, blocks=1, vocabulary=32)
MATMUL = matmul_workload(16, 16, 16)
