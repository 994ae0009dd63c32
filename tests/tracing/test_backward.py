"""The backward pass that `memory` runs node by node: its gradients are those of torch's engine."""

import torch

from amp_lab.tracing.backward import run_backward, seeds_of


def test_an_output_that_comes_twice_gets_both_gradients():
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    gradients = run_backward(seeds_of((y, y)))
    assert gradients[id(x)].tolist() == [6, 6]
