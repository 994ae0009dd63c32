"""What the recipes of notebook 07 share: a small problem, and each loop as it is in fp32.

The fp32 loops are those of the notebook without the lines that AMP adds.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

MAX_NORM = 0.1  # gradients are clipped to this length
GROUP = 2  # batches that are accumulated before a step
PENALTY = 0.1  # weight of the squared length of the gradient


def train_plain(model, optimizer, batches):
    """Take a step for each batch."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


def clip_plain(model, optimizer, batches):
    """Clip the gradients to a length of `MAX_NORM`."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def accumulate_plain(model, optimizer, batches):
    """Add the gradients of `GROUP` batches before each step."""
    for first in range(0, len(batches), GROUP):
        group = batches[first : first + GROUP]  # the last one may be shorter
        samples = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            loss = F.mse_loss(model(x), y) * (len(x) / samples)
            loss.backward()
        optimizer.step()


def penalty_plain(model, optimizer, batches):
    """Add the squared length of the gradient to the loss."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        loss = loss + PENALTY * sum(grad.square().sum() for grad in grads)
        loss.backward()
        optimizer.step()


def decay(optimizer):
    """A schedule from the full learning rate down to a tenth of it, in five steps."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5)


def schedule_plain(model, optimizer, batches):
    """Lower the learning rate after each step."""
    scheduler = decay(optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the recipes."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class SmallProblem:
    """A network and five batches, on which a recipe is compared with its fp32 loop.

    `batches` are pairs of inputs (B, 8) and targets (B, 1). The last one is shorter than the
    others, as the last one of an epoch often is.
    """

    def __init__(self, device: torch.device):
        self.device = device
        torch.manual_seed(0)
        inputs = torch.randn(72, 8)
        targets = inputs.sin().mean(dim=1, keepdim=True)
        pairs = zip(inputs.to(device).split(16), targets.to(device).split(16), strict=True)
        self.batches = list(pairs)

    def new_model(self) -> nn.Module:
        """The same network every time."""
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(self.device)

    def change(self, recipe, dtype=None, make_model=None, make_optimizer=sgd) -> torch.Tensor:
        """How far `recipe` moves each weight of a new model, as one vector.

        Without a `dtype` the recipe is an fp32 loop. With one it is an AMP loop, which gets a
        scaler too, and must not skip a step.
        """
        model = (make_model or self.new_model)()
        optimizer = make_optimizer(model)
        before = parameters_to_vector(model.parameters()).detach().clone()
        if dtype is None:
            recipe(model, optimizer, self.batches)
        else:
            scaler = torch.amp.GradScaler(self.device.type, enabled=dtype is torch.float16)
            first_scale = scaler.get_scale()
            recipe(model, optimizer, scaler, dtype)
            assert scaler.get_scale() == first_scale, "a step was skipped"
        return parameters_to_vector(model.parameters()).detach() - before

    def check_same(self, plain, amp, make_model=None) -> None:
        """Assert that `amp` moves the weights as `plain` does, up to four roundings of its dtype.

        A value is rounded several times on its way through the network, and the errors cancel in
        part.
        """
        reference = self.change(plain, make_model=make_model)
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            tolerance = 4 * torch.finfo(dtype).eps / 2  # eps/2 is one rounding
            found = self.change(amp, dtype, make_model=make_model)
            assert distance(found, reference) < tolerance, name
            print(f"{name}: the weights move as in fp32, to within 1/{1 / tolerance:.0f}")


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Length of the difference of two vectors, relative to the length of the second."""
    return ((found - reference).norm() / reference.norm()).item()
