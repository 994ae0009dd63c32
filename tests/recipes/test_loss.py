"""The loss of a model without one: as a function and as code, it is the same."""

import pytest
import torch

from amp_lab.recipes import loss_of

X = torch.ones(3, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ({"loss": X.sum(), "logits": X}, "output['loss']"),
        ((X, {"ids": torch.zeros(2)}), "output[0].float().square().mean()"),
        (X.sum(), "output"),  # a model that returns its loss
        (X, "output.float().square().mean()"),
    ],
)
def test_the_loss_of_an_output_is_its_own_or_its_mean_square(output, code):
    loss = loss_of(output)
    assert str(loss) == code
    assert torch.equal(loss(output), eval(code, {"output": output}))


def test_an_output_without_a_gradient_has_no_loss():
    assert loss_of(torch.ones(3)) is None
