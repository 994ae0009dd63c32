"""Every way of running a model on one image gives the model's answer."""

import importlib.util

import pytest
import torch

from amp_lab import Precision
from measure import latency


@pytest.mark.weekly
@pytest.mark.parametrize("low", [Precision.BF16, Precision.FP16])
def test_all_ways_give_one_answer(low):
    torch.manual_seed(0)
    model = latency.tiny_models()["small"]().eval()
    image = torch.rand(1, 3, 8, 8)
    with torch.inference_mode():
        wanted = model(image)
        found = latency.ways(model, image, low)
        for name, way in found.items():
            answer = way()
            answer = torch.from_numpy(answer[0]) if isinstance(answer, list) else answer
            near = 1e-5 if "fp32" in name else 2e-2
            torch.testing.assert_close(answer.float(), wanted, rtol=0, atol=near)
    assert ("ONNX Runtime, fp32" in found) == bool(importlib.util.find_spec("onnxruntime"))
