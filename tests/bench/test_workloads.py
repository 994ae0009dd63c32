"""What the benchmark runs, in the sizes that suit a device."""

import pytest
import torch
from torch import nn

from amp_lab.bench.workloads import WORKLOADS, classifier_workload, workloads


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workloads_have_every_name(device, quick):
    found = workloads(device, quick=quick)
    assert {w.name for w in found} == set(WORKLOADS) - ({"resnet50"} if quick else set())
    assert len({(w.name, w.size) for w in found}) == len(found)


def test_sizes_of_the_article_on_an_accelerator():
    assert "512x512" in workloads("cuda", quick=False)[0].size


def test_dropout_is_off():
    problem = classifier_workload("mobilenet_v2", 1, 32).build(torch.device("cpu"))
    assert [m.p for m in problem.call.model.modules() if isinstance(m, nn.Dropout)] == [0.0]
