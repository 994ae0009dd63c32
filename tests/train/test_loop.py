"""The training loop: what it computes, in each precision, and that it goes on where it stopped."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import DeviceError, Precision, evaluate, fit
from amp_lab.train.checkpoint import (
    load_checkpoint,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from amp_lab.train.loop import Progress, cross_entropy

PRECISIONS = ["fp32", "bf16", "fp16"]
BATCH, BATCHES = 4, 5


def make_model() -> nn.Module:
    """A small classifier of 3x6x6 images with all that matters: norm, dropout, a convolution."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(128, 4),
    )


def make_batches(epoch: int = 0, start: int = 0) -> list:
    generator = torch.Generator().manual_seed(epoch)
    images = torch.randn(BATCHES * BATCH, 3, 6, 6, generator=generator)
    targets = torch.randint(4, (BATCHES * BATCH,), generator=generator)
    return list(zip(images.split(BATCH), targets.split(BATCH), strict=True))[start:]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(precision: str, epochs: int = 2, **options) -> tuple[nn.Module, list]:
    model = make_model()
    torch.manual_seed(2)
    options.setdefault("optimizer", make_optimizer(model))
    metrics = fit(model, make_batches, precision=precision, device="cpu", epochs=epochs, **options)
    return model, metrics


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_it_computes_what_the_plain_loop_computes(precision, clip_norm):
    """The loop of PyTorch's own documentation, to the last bit."""
    model = make_model()
    torch.manual_seed(2)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    losses = []
    for epoch in range(2):
        for images, targets in make_batches(epoch):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(images).float(), targets)
            scaler.scale(loss).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    ours, metrics = train(precision, clip_norm=clip_norm)
    assert_equal(ours, model)
    means = [sum(losses[:BATCHES]) / BATCHES, sum(losses[BATCHES:]) / BATCHES]
    assert [m.train_loss for m in metrics] == pytest.approx(means, rel=1e-6)  # fp32 sums


@pytest.mark.parametrize("accumulate", [2, 3, 5, 7])
def test_accumulated_batches_are_one_large_batch(accumulate):
    """Also where the last group is shorter, and a batch is smaller than the rest."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    start = copy.deepcopy(model)
    small = [(x.double(), y) for x, y in make_batches()]
    small[-1] = (small[-1][0][:1], small[-1][1][:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(
        model,
        lambda epoch, batch: small,
        optimizer=optimizer,
        precision="fp32",
        device="cpu",
        epochs=1,
        accumulate=accumulate,
        loss_fn=F.cross_entropy,
    )
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    for first in range(0, BATCHES, accumulate):
        images, targets = map(torch.cat, zip(*small[first : first + accumulate], strict=True))
        F.cross_entropy(start(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), start.state_dict())  # float64: 1e-7


def test_the_scale_grows_and_falls_and_a_bad_step_is_skipped():
    bad = make_batches()
    bad[2] = (bad[2][0] * math.inf, bad[2][1])
    seen = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))

    def after_step(progress: Progress) -> bool:
        seen.append((scaler.get_scale(), model[1].weight.detach().clone()))
        return False

    fit(
        model,
        lambda epoch, batch: bad,
        optimizer=make_optimizer(model),
        precision="fp16",
        device="cpu",
        epochs=1,
        scaler=scaler,
        after_step=after_step,
    )
    scales, weights = zip(*seen, strict=True)
    assert scales == (2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11)
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert weights[-1].isfinite().all()


class Reads(TorchDispatchMode):
    """Counts how often a value is read from the device, for which the host has to wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_step_waits_for_the_device(precision):
    counts = []
    with Reads() as reads:

        def after_step(progress: Progress) -> bool:
            counts.append(reads.count)
            return False

        train(precision, epochs=1, after_step=after_step, clip_norm=1.0)
    assert len(counts) == BATCHES
    assert counts[-1] == counts[0]
    assert reads.count > counts[-1]  # at the end of the epoch, so the counter does count


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("accumulate", "stop_after"), [(1, 1), (1, 5), (1, 7), (2, 2), (2, 4)])
def test_stopped_and_resumed_it_ends_bitwise_equal(precision, accumulate, stop_after, tmp_path):
    def start() -> dict:
        model = make_model()
        torch.manual_seed(2)
        optimizer = make_optimizer(model)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
            "scaler": Precision(precision).grad_scaler("cpu", growth_interval=3),
            "progress": Progress(),
        }

    def go_on(parts: dict, **options) -> list:
        parts = dict(parts)
        return fit(
            parts.pop("model"), make_batches, precision=precision, device="cpu", epochs=2,
            accumulate=accumulate, **parts, **options,
        )  # fmt: skip

    whole = start()
    expected = go_on(whole)

    steps = []
    stopped = start()
    go_on(stopped, after_step=lambda progress: steps.append(1) or len(steps) == stop_after)
    assert len(steps) == stop_after
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, **stopped, random=random_states())

    torch.manual_seed(99)
    resumed, state = start(), load_checkpoint(path)
    for name in ("model", "optimizer", "scheduler", "scaler"):
        resumed[name].load_state_dict(state[name])
    resumed["progress"] = Progress.from_state_dict(state["progress"])
    restore_random_states(state["random"])
    metrics = go_on(resumed)

    assert_equal(resumed["model"], whole["model"])
    assert resumed["scaler"].state_dict() == whole["scaler"].state_dict()
    torch.testing.assert_close(
        resumed["optimizer"].state_dict(), whole["optimizer"].state_dict(), rtol=0, atol=0
    )
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ("epoch", "train_loss", "train_accuracy", "lr", "loss_scale"):
            assert getattr(ours, name) == getattr(theirs, name), name


def test_evaluate_gives_mean_loss_and_accuracy_and_leaves_the_mode():
    model = nn.Flatten()  # the inputs are the logits
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    batches = [(logits[:2], torch.tensor([0, 1])), (logits[2:], torch.tensor([1]))]
    loss, accuracy = evaluate(model, batches, precision="fp32", device="cpu")
    assert accuracy == pytest.approx(2 / 3)
    right = math.log1p(math.exp(-9))
    assert loss == pytest.approx((2 * right + right + 9) / 3, rel=1e-5)
    assert model.training
    model.eval()
    evaluate(model, batches, precision="bf16", device="cpu")
    assert not model.training


def test_metrics_have_the_test_set_if_there_is_one():
    _, without = train("fp32", epochs=1)
    assert math.isnan(without[0].test_loss)
    model, metrics = train("fp32", epochs=1, test_batches=make_batches)
    loss, accuracy = evaluate(model, make_batches(), precision="fp32", device="cpu")
    assert (metrics[0].test_loss, metrics[0].test_accuracy) == (loss, accuracy)
    assert metrics[0].images_per_s > 0


def test_the_loss_is_computed_in_fp32():
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    assert cross_entropy(logits, torch.tensor([0])).dtype is torch.float32


def test_channels_last_reaches_the_convolution():
    seen = []
    model = make_model()
    model[0].register_forward_pre_hook(
        lambda module, args: seen.append(
            [t.is_contiguous(memory_format=torch.channels_last) for t in (args[0], module.weight)]
        )
    )
    fit(
        model, make_batches, optimizer=make_optimizer(model), precision="bf16", device="cpu",
        epochs=1, channels_last=True, test_batches=make_batches,
    )  # fmt: skip
    assert seen == [[True, True]] * (2 * BATCHES)


def test_tf32_and_fp32_set_their_mode_in_the_backward_pass_too_and_restore_it():
    modes = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            modes.append(torch.backends.cuda.matmul.fp32_precision)
            return gradient

    class Model(nn.Linear):
        def forward(self, x):
            return Identity.apply(super().forward(x.flatten(1)))

    before = torch.backends.cuda.matmul.fp32_precision
    model = Model(108, 4)
    fit(
        model, make_batches, optimizer=make_optimizer(model), precision="fp32", device="cpu",
        epochs=1,
    )  # fmt: skip
    assert modes == ["ieee"] * BATCHES
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_nothing_is_written_where_there_is_no_terminal(capfd):
    train("fp32", test_batches=make_batches)
    assert capfd.readouterr() == ("", "")


def test_a_missing_device_is_refused():
    missing = next(
        d for d in ("xpu", "mps", "cuda") if not torch.get_device_module(d).is_available()
    )
    model = make_model()
    with pytest.raises(DeviceError, match=missing):
        fit(
            model, make_batches, optimizer=make_optimizer(model), precision="fp16", device=missing,
            epochs=1,
        )  # fmt: skip


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="fp7"):
        train("fp7")
