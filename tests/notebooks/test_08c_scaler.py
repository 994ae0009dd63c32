"""Notebook 08c: statements about the scaler that no cell checks, and the rows of its table."""

import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from amp_lab.numerics import gradient_underflow

X = torch.tensor([[1.0, 2.0]])


def cpu_scaler(**options):
    return torch.amp.GradScaler("cpu", **options)


# The parameters are fp16


def test_a_gradient_that_is_unscaled_in_fp16_vanishes():
    """2^-26 is a number of fp32 alone."""
    parameter = nn.Parameter(torch.ones(1).half())
    parameter.sum().backward()
    assert parameter.grad.dtype is torch.float16
    scaled = torch.tensor([2.0**-26]).mul(4096).half()
    assert scaled > 0
    assert scaled.float() / 4096 == 2.0**-26
    parameter.grad = scaled
    optimizer, inverse, found_inf = (
        torch.optim.SGD([parameter]),
        torch.tensor(1 / 4096),
        torch.zeros(()),
    )
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        cpu_scaler()._unscale_grads_(optimizer, inverse, found_inf, allow_fp16=False)
    cpu_scaler()._unscale_grads_(optimizer, inverse, found_inf, allow_fp16=True)
    assert parameter.grad == 0


def test_fp16_gradients_of_a_fused_optimizer_cannot_be_unscaled_to_clip():
    """Though the step itself, which unscales them, raises nothing."""
    parameter, scaler = nn.Parameter(torch.ones(1).half()), cpu_scaler()
    optimizer = torch.optim.AdamW([parameter], fused=True)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def checkpoint(request, tmp_path_factory):
    """The folder of a tiny language model in 16 bits, and its dtype."""
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.GPT2LMHeadModel(config).to(request.param).save_pretrained(folder)
    return folder, request.param


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_checkpoint_in_its_own_dtype(checkpoint):
    transformers = pytest.importorskip("transformers", minversion="5")
    folder, dtype = checkpoint
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(folder).dtype is dtype
    assert load(folder, dtype=torch.float32).dtype is torch.float32


@pytest.mark.filterwarnings("ignore")
def test_peft_trains_adapters_in_fp32_but_not_modules_to_save(checkpoint):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    folder, dtype = checkpoint

    def trained(**options):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **options)
        model = peft.get_peft_model(model, config)
        before = {p.dtype for p in model.parameters() if p.requires_grad}
        peft.cast_mixed_precision_params(model, dtype)
        after = {p.dtype for p in model.parameters() if p.requires_grad}
        return before, after

    assert trained() == ({torch.float32}, {torch.float32})
    assert trained(modules_to_save=["lm_head"]) == ({torch.float32, dtype}, {torch.float32})


def test_complex_gradients_are_refused():
    """AMP0130: by the same message that CUDA has for bf16, and a disabled scaler takes them."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    disabled, scaler = cpu_scaler(enabled=False), cpu_scaler()
    disabled.scale(parameter.abs().sum()).backward()
    disabled.step(torch.optim.SGD([parameter], lr=0.5))
    assert parameter == 0.5
    scaler.scale(parameter.abs().sum()).backward()
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        scaler.step(torch.optim.SGD([parameter]))


# Gradients are unscaled twice


@pytest.mark.parametrize("updates", [True, False])
def test_an_iteration_that_calls_unscale_needs_update_even_without_a_step(updates):
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), cpu_scaler()
    expected = nullcontext() if updates else pytest.raises(RuntimeError, match="already been call")
    with expected:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            if updates:
                scaler.update()


def test_an_update_inside_an_accumulation_adds_scaled_to_unscaled_gradients():
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), cpu_scaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    assert weight.grad == 1 + 2**16
    scaler.unscale_(optimizer)  # no message
    assert weight.grad == 1 + 2.0**-16  # it should be 2


# An optimizer has no gradients


@pytest.mark.parametrize("cause", ["no backward", "another copy", "a cut graph", "frozen"])
def test_an_optimizer_without_gradients_is_refused(cause):
    """AMP0011."""
    model, copy = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD((copy if cause == "another copy" else model).parameters())
    scaler = cpu_scaler()
    if cause == "frozen":
        model.requires_grad_(False)
    loss = scaler.scale(model(torch.ones(1, 2)).sum())
    if cause == "another copy":
        loss.backward()
    if cause == "a cut graph":
        cut = scaler.scale(torch.tensor(loss.item()))
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            cut.backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_an_optimizer_that_had_no_gradients_in_unscale_is_refused():
    """AMP0011: even if it has gradients in the step."""
    model, scaler = nn.Linear(2, 1), cpu_scaler()
    optimizer = torch.optim.SGD(model.parameters())
    loss = scaler.scale(model(X).sum())
    scaler.unscale_(optimizer)
    loss.backward()
    assert model.weight.grad is not None
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscaled", [False, True])
def test_update_needs_an_optimizer_that_was_unscaled_or_stepped(unscaled):
    """AMP0011."""
    model, scaler = nn.Linear(2, 1), cpu_scaler()
    scaler.scale(model(X).sum()).backward()
    if unscaled:
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    expected = pytest.raises(AssertionError, match="No inf checks were recorded prior to update")
    with nullcontext() if unscaled else expected:
        scaler.update()


@pytest.mark.parametrize("combine", [torch.stack, sum])
def test_stack_and_a_sum_keep_the_graph(combine):
    """AMP0011."""
    model = nn.Linear(2, 2)
    combine([*model(X)[0]]).sum().backward()
    assert model.weight.grad is not None


def test_a_fused_optimizer_without_gradients_is_refused_at_update():
    optimizer, scaler = torch.optim.AdamW(nn.Linear(2, 1).parameters(), fused=True), cpu_scaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda outputs: torch.tensor(outputs.sum().item()),
        lambda outputs: outputs.sum().detach(),
        lambda outputs: torch.tensor([*outputs[0]], requires_grad=True).sum(),
        lambda outputs: outputs.argmax().float(),
        lambda outputs: torch.histc(outputs, bins=4).sum(),
        lambda outputs: (outputs > 0).float().mean(),
    ],
)
def test_a_loss_without_a_graph_gives_the_weights_no_gradient_even_if_it_is_said_to(loss_of):
    model = nn.Linear(2, 2)
    loss = loss_of(model(X))
    if not loss.requires_grad:
        loss.requires_grad_()
    loss.backward()
    assert model.weight.grad is None


def test_gradient_underflow_refuses_a_loss_without_a_graph_or_of_another_model():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the loss has no graph"):
        gradient_underflow(model, model(X).sum().detach())
    with pytest.raises(ValueError, match="the loss does not depend on the model"):
        gradient_underflow(model, nn.Linear(2, 2)(X).sum())


# Scaler methods are called in the wrong order


def test_a_scale_that_is_left_out_later_raises_nothing():
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), cpu_scaler()
    for scale in (scaler.scale, nn.Identity()):
        optimizer.zero_grad()
        scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.bias.grad.item() == 2.0**-16  # divided all the same


def test_the_scale_after_update_is_that_of_the_next_step():
    """AMP0306."""
    weight, scaler = nn.Parameter(torch.ones(1)), cpu_scaler()
    weight.grad = torch.tensor([torch.inf])
    scaled_loss = scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    scaler.update()
    assert scaled_loss / scaler.get_scale() == 2


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_the_state_of_a_scaler_can_be_read_at_any_time_but_the_scaler_not_be_pickled(method):
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), cpu_scaler()
    scaler.scale(model(X).sum()).backward()
    getattr(scaler, method)(optimizer)
    assert scaler.state_dict()["scale"] == 2**16
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)


# Lightning


@pytest.fixture
def mixed():
    """Makes the plugin of Lightning for a precision on the CPU."""
    plugins = pytest.importorskip("lightning.pytorch.plugins", reason="Lightning is not installed")

    def make(precision="16-mixed"):
        scaler = cpu_scaler(init_scale=1024.0) if precision == "16-mixed" else None
        return plugins.MixedPrecision(precision, "cpu", scaler=scaler)

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["manual_backward", "backward"])
def test_lightning_scales_only_in_its_manual_backward(way, mixed):
    """A loss that goes backward by itself passes the scaler by."""
    seen, trainer, module = manual_optimization(mixed, way)
    expected = nullcontext()
    if way == "backward":
        expected = pytest.raises(AssertionError, match="Attempted unscale_ but _scale is None")
    with expected:
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert seen["training_step"] == (1024 if way == "manual_backward" else 1)


def test_accelerate_scales_the_loss_in_its_backward():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = cpu_scaler(init_scale=1024.0)  # on a CPU it creates none itself
    weight = nn.Parameter(torch.ones(1))
    accelerator.backward(weight.sum())
    assert weight.grad == 1024


@pytest.mark.filterwarnings("ignore")
def test_fabric_scales_the_loss_in_its_backward():
    fabric_of = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")
    scaler = cpu_scaler(init_scale=1024.0)
    plugin = fabric_of.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fabric = fabric_of.Fabric(accelerator="cpu", plugins=[plugin])
    layer = nn.Linear(1, 1)
    model, _ = fabric.setup(layer, torch.optim.SGD(layer.parameters()))
    fabric.backward(model(torch.ones(1, 1)).sum())
    assert layer.bias.grad == 1024


@pytest.mark.filterwarnings("ignore")
def test_lightning_unscales_in_the_step_of_manual_optimization(mixed):
    """AMP0137: before the step the gradients are scaled, in the hook they are not."""
    seen, trainer, module = manual_optimization(mixed)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert seen == {"training_step": 1024, "hook": 1, "clipped": 0.5}


def manual_optimization(mixed, way="manual_backward"):
    """What is seen of the gradient, a trainer, and a module that steps by hand."""
    lightning = pytest.importorskip("lightning.pytorch")
    seen = {}

    class Manual(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, _):
            loss = self.layer(batch).sum()
            self.manual_backward(loss) if way == "manual_backward" else loss.backward()
            seen["training_step"] = self.layer.weight.grad.item()
            self.optimizers().step()

        def on_before_optimizer_step(self, optimizer):
            seen["hook"] = self.layer.weight.grad.item()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            seen["clipped"] = round(self.layer.weight.grad.item(), 4)

    return seen, trainer_of(lightning, mixed()), Manual()


def trainer_of(lightning, plugin):
    return lightning.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("alternately", [True, False])
def test_lightning_updates_the_scaler_after_each_optimizer(alternately, mixed):
    """AMP0132: so the gradients of the second are too large if its loss was scaled before."""
    lightning = pytest.importorskip("lightning.pytorch")
    gradients = []

    class Manual(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(1, 1, bias=False) for _ in range(2))

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.first, self.second)]

        def training_step(self, batch, _):
            first, second = self.optimizers()
            self.manual_backward(self.first(batch).sum() * torch.inf)
            if alternately:
                first.step()
            self.manual_backward(self.second(batch).sum())
            if not alternately:
                first.step()
            second.step()
            gradients.append(self.second.weight.grad.item())

    trainer_of(lightning, mixed()).fit(Manual(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert gradients == [1 if alternately else 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_lightning_leaves_the_gradients_of_a_fused_optimizer_scaled_where_it_clips(fused, mixed):
    """AMP0074."""
    seen, trainer, module = manual_optimization(mixed)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), fused=fused)
    refused = pytest.raises(RuntimeError, match="does not allow for gradient clipping")
    with refused if fused else nullcontext():
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert seen["hook"] == (1024 if fused else 1)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_lightning_refuses_to_clip_with_a_fused_optimizer(precision, mixed):
    """AMP0074."""
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), fused=True)
    said = "The current optimizer, AdamW, does not allow for gradient clipping because it performs"
    with pytest.raises(RuntimeError, match=said):
        mixed(precision).clip_gradients(optimizer, 1.0)
    mixed(precision).clip_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 0.0)


def test_fabric_refuses_to_clip_with_a_fused_optimizer():
    """AMP0074."""
    plugins = pytest.importorskip("lightning.fabric.plugins", reason="Lightning is not installed")
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=cpu_scaler())
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), fused=True)
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented for optim"):
        plugin.unscale_gradients(optimizer)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning_refuses_lbfgs_in_fp16_alone(mixed):
    """AMP0013."""
    optimizer = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    with pytest.raises(Exception, match="AMP and the LBFGS optimizer are not compatible"):
        mixed().optimizer_step(optimizer, model=None, closure=None)
    losses = lbfgs_in_lightning(mixed("bf16-mixed"))
    assert losses[-1] < 0.01 * losses[0]


def lbfgs_in_lightning(plugin):
    """The losses of one step of L-BFGS, which calls its closure several times."""
    lightning = pytest.importorskip("lightning.pytorch")
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

        def training_step(self, batch, _):
            loss = (self.layer(batch) - 2).square().sum()
            losses.append(loss.item())
            return loss

    trainer_of(lightning, plugin).fit(Module(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    return losses


def test_a_fused_optimizer_can_be_clipped_in_a_loop():
    """AMP0074."""
    weights = []
    for fused in (False, True):
        weight = nn.Parameter(torch.ones(2))
        optimizer, scaler = torch.optim.SGD([weight], lr=0.1, fused=fused), cpu_scaler()
        scaler.scale(weight.square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 0.5)
        scaler.step(optimizer)
        weights.append(weight.detach())
    torch.testing.assert_close(*weights)
    assert weights[0].sub(1).norm() == pytest.approx(0.05, rel=1e-4)


# The optimizer steps without the scaler


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("by_scaler", [True, False])
def test_only_the_step_of_the_scaler_is_skipped(by_scaler, bad):
    """AMP0131."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.Adam([weight], lr=0.1), cpu_scaler()
    scaler.scale(bad * weight.sum()).backward()
    scaler.step(optimizer) if by_scaler else optimizer.step()
    assert weight.isfinite() == by_scaler


@pytest.mark.parametrize("first", ["scaler", "optimizer"])
def test_both_steps_update_the_weights_twice(first):
    """AMP0131."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.Adam([weight], lr=0.1), cpu_scaler()
    scaler.scale(weight.sum()).backward()
    steps = [lambda: scaler.step(optimizer), optimizer.step]
    for step in steps if first == "scaler" else reversed(steps):
        step()
    assert optimizer.state[weight]["step"] == 2
    assert weight < 0.9


@pytest.mark.parametrize("groups", [1, 2])
def test_a_hand_written_scale_has_to_be_divided_out_in_all_groups(groups):
    """AMP0131: a group that is left out takes a step that is as many times too long."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    (1024 * sum(weights)).backward()
    for group in optimizer.param_groups[:groups]:
        for weight in group["params"]:
            weight.grad /= 1024
    optimizer.step()
    assert weights[0].item() == pytest.approx(0.9)
    assert (weights[1].item() == pytest.approx(0.9)) == (groups == 2)


# The optimizer needs a closure


@pytest.mark.parametrize("overflows", [False, True])
def test_nothing_skips_the_first_step_of_an_optimizer_with_two_passes(overflows):
    """SAM climbs to a worse point, goes back, and steps with the gradient of there."""
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), cpu_scaler()

    def gradients(factor):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.update()

    for step in range(3):
        gradients(torch.inf if overflows and step == 0 else 1.0)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.05 * weight.grad / weight.grad.norm())  # the first step
        gradients(1.0)
        with torch.no_grad():
            weight.copy_(before)
        optimizer.step()
    assert weight.isfinite().all() != overflows


def test_a_closure_passed_by_position_gets_scaled_gradients_that_nobody_checks():
    """The optimizer sees what the closure left, and steps with infinities too."""
    seen = []

    class WithClosure(torch.optim.SGD):
        def step(self, closure):
            closure()
            seen.append(weight.grad.item())
            super().step()

    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = WithClosure([weight], lr=0.1), cpu_scaler()
    for factor in (1.0, torch.inf):

        def closure(factor=factor):
            optimizer.zero_grad()
            scaler.scale(factor * weight.sum()).backward()

        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer, closure)
        scaler.update()
    assert seen == [2.0**16, torch.inf]
    assert not weight.isfinite()


# The scheduler warns that it came before the optimizer


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_scheduler_warns_at_its_first_call_alone(skipped):
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), cpu_scaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    expected = nullcontext()  # a warning would be an error here
    if skipped == 0:
        expected = pytest.warns(UserWarning, match="before `optimizer.step")
    with expected:
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if step == skipped else 1.0
            scaler.scale(factor * weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert scaler.get_scale() == 2.0**15  # one step was skipped either way


def test_a_step_before_the_loop_hides_the_warning_but_the_schedule_is_still_ahead():
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), cpu_scaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()  # without gradients; a warning would be an error below
    scaler.scale(torch.inf * weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert weight == 1  # no step yet
    assert scheduler.get_last_lr() == [0.5]


def test_the_scheduler_warns_of_a_step_that_was_replaced():
    """AMP0139: as Apex does."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = optimizer.step
    optimizer.step = lambda: step()
    optimizer.step()
    with pytest.warns(UserWarning, match="has been overridden after learning rate"):
        scheduler.step()


# The other rows


@pytest.mark.parametrize("update_between", [True, False])
def test_an_update_between_two_steps_divides_by_another_scale(update_between):
    """AMP0132."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (first, second)]
    scaler = cpu_scaler()
    scaler.scale(torch.inf * first.sum()).backward()
    scaler.scale(second.sum()).backward()
    scaler.step(optimizers[0])
    if update_between:
        scaler.update()
    scaler.step(optimizers[1])
    assert second.grad == (2 if update_between else 1)


def test_a_parameter_of_two_optimizers_is_divided_twice():
    """AMP0132."""
    weight, scaler = nn.Parameter(torch.ones(1)), cpu_scaler()
    scaler.scale(weight.sum()).backward()
    for optimizer in (torch.optim.SGD([weight]), torch.optim.SGD([weight])):
        scaler.step(optimizer)
    assert weight.grad == 2.0**-16


def test_a_penalty_of_scaled_gradients_is_too_large_by_the_square_of_the_scale():
    """AMP0116."""
    weight, scaler = nn.Parameter(torch.ones(1)), cpu_scaler()
    loss = scaler.scale(weight.square().sum())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert gradient.square() == 4 * 2.0**32
    assert (gradient / scaler.get_scale()).square() == 4


def test_a_penalty_can_overflow_in_fp16_without_a_scale():
    """AMP0116."""
    gradient = torch.full((4,), 300.0)
    assert torch.isinf((gradient.half().norm() - 1).square())
    assert (gradient.norm() - 1).square() == 599**2


@pytest.mark.parametrize("loss", [1.0, None])
def test_a_loss_that_is_no_tensor_is_refused(loss):
    """AMP0134."""
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        cpu_scaler().scale(loss)


def test_a_dict_of_losses_becomes_a_map():
    """AMP0134."""
    losses = {"a": torch.ones((), requires_grad=True)}
    with pytest.raises(AttributeError, match="'map' object has no attribute 'backward'"):
        cpu_scaler().scale(losses).backward()
    with pytest.raises(ValueError, match="outputs must be a Tensor"):
        list(cpu_scaler().scale(dict(enumerate(losses.values()))))  # it takes the keys
    cpu_scaler().scale(sum(losses.values())).backward()
    for several in ([torch.ones(())] * 2, (torch.ones(()),) * 2):
        assert [float(loss) for loss in cpu_scaler().scale(several)] == [2.0**16] * 2


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients_are_unscaled(sparse):
    """AMP0135: in the versions of torch that we support."""
    layer = nn.Embedding(4, 2, sparse=sparse)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), cpu_scaler()
    scaler.scale(layer(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    assert layer.weight.grad.to_dense()[1].tolist() == [2, 2]
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"growth_factor": 1.0}, "The growth factor must be > 1.0."),
        ({"backoff_factor": 1.0}, "The backoff factor must be < 1.0."),
    ],
)
def test_factors_of_one_are_refused(options, said):
    """AMP0136."""
    with pytest.raises(AssertionError, match=said):
        cpu_scaler(**options)


def test_a_new_scale_is_a_float_or_a_tensor_without_dimensions():
    """AMP0136: and it keeps the scale constant, whatever the gradients are."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), cpu_scaler(init_scale=1024.0)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update(1024.0)
        assert scaler.get_scale() == 1024
    falls = cpu_scaler(growth_interval=2**31 - 1)
    weight.grad = torch.full((1,), torch.inf)
    falls.scale(torch.ones(()))
    falls.step(optimizer)
    falls.update()
    assert falls.get_scale() == 2**15
    with pytest.raises(AttributeError, match="'int' object has no attribute 'device'"):
        scaler.update(1024)
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(torch.ones(2))
    for refused in (torch.tensor(8.0, device="meta"), torch.tensor(8.0, requires_grad=True)):
        with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
            scaler.update(refused)
    with pytest.raises(RuntimeError, match="output with shape"):
        scaler.update(torch.ones(1))
    scaler.update(torch.tensor(512.0))
    assert scaler.get_scale() == 512


def test_the_sharded_scaler_keeps_the_dtype_of_the_loss():
    """AMP0138."""
    loss = torch.ones(()).half()
    assert cpu_scaler().scale(loss) == 2**16
    assert ShardedGradScaler("cpu", process_group=None).scale(loss).isinf()
    assert ShardedGradScaler("cpu", process_group=None).scale(loss.float()) == 2**16


# The scheduler warns that it came before the optimizer


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning_advances_the_schedule_only_after_a_step(recwarn):
    """AMP0014: the methods of the page, for two schedulers, and after the scale was restored."""
    lightning = pytest.importorskip("lightning")
    precision = pytest.importorskip("lightning.pytorch.plugins.precision")
    page = (Path(__file__).parents[2] / "notebooks" / "08c_scaler.py").read_text(encoding="utf-8")
    lines = page.partition("# ```python\n# def optimizer_step")[2].partition("# ```")[0]
    methods = "def optimizer_step" + lines.replace("\n#\n", "\n\n").replace("\n# ", "\n")

    def rates(overridden: bool, overflows=(0,), restored=None, name="16-mixed") -> list[float]:
        seen = []

        class Base(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def training_step(self, batch, batch_idx):
                seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
                return self.layer(batch).sum() * (1e30 if batch_idx in overflows else 1.0)

            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                other = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
                return [optimizer], [
                    {"scheduler": s, "interval": "step"} for s in (other, scheduler)
                ]

        names = {}
        code = methods.replace("super()", "super(type(self), self)")
        exec(code, names)
        changed = {name: names[name] for name in ("optimizer_step", "lr_scheduler_step")}
        changed = changed if overridden else {}
        scaler = cpu_scaler(init_scale=1024.0)  # a gradient of 65536 would be inf in fp16
        if restored is not None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": restored})
        plugins = {
            "16-mixed": lambda: precision.MixedPrecision("16-mixed", "cpu", scaler=scaler),
            "bf16-mixed": lambda: precision.MixedPrecision("bf16-mixed", "cpu"),
            "32-true": precision.Precision,
        }
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[plugins[name]()],
        )
        loader = torch.utils.data.DataLoader(torch.ones(3, 2), batch_size=1)
        trainer.fit(type("Module", (Base,), changed)(), loader)
        return seen

    assert rates(overridden=False) == [1.0, 0.5, 0.25]
    assert rates(overridden=True) == [1.0, 1.0, 0.5]
    assert rates(overridden=True, overflows=(1,)) == [1.0, 0.5, 0.5]
    assert rates(overridden=True, overflows=(), restored=16.0) == [1.0, 0.5, 0.25]
    for name in ("bf16-mixed", "32-true"):  # without a scaler
        assert rates(overridden=True, overflows=(), name=name) == [1.0, 0.5, 0.25]


def test_a_loss_that_was_scaled_is_divided_by_the_scale_before_the_update():
    """AMP0306."""
    weight = nn.Parameter(torch.ones(()))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cpu")
    loss = weight * 0.5
    scaled = scaler.scale(loss)
    scaled.backward()
    assert scaled.item() == 0.5 * 65536
    assert scaled.item() / scaler.get_scale() == loss.item() == 0.5
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1 - 0.5 * 0.5  # the training itself is not affected
