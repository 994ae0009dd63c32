"""The same training through other libraries, each written as its own documentation writes it.

`PEERS` has a builder for each: ``torch`` (a bare loop), ``amp_lab`` (`training.fit`), ``fabric``
(Lightning Fabric), ``accelerate`` (Hugging Face) and ``keras`` (Keras 3 on its torch backend). The
last three are in the dependency groups ``bench`` and ``keras``; nothing of them is imported before
it is asked for.
"""

import functools
import importlib
import itertools
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

from amp_lab.errors import OptionError
from amp_lab.precision import Precision, require_backend
from amp_lab.training.loop import fit

LossFn = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to a mean over the batch; outputs may arrive in the low precision."""

Run = Callable[[int], Tensor]
"""Does that many training steps; returns the loss of the last, detached and on the device."""

Build = Callable[
    [nn.Module, torch.optim.Optimizer, LossFn, tuple[Tensor, Tensor], Precision, torch.device], Run
]


def _peer(build: Build) -> Build:
    """What every builder has in common: the checks, the float32 mode, and nothing left behind."""

    @functools.wraps(build)
    def checked(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        batch: tuple[Tensor, Tensor],
        precision: Precision | str,
        device: torch.device | str,
    ) -> Run:
        precision, device = Precision(precision), torch.device(device)
        require_backend(device.type)
        model.train()
        with _process_kept():
            run = build(model, optimizer, loss_fn, batch, precision, device)
        # IEEE for fp32 and TF32 for tf32, in the backward pass too, which no library sees to.
        mode = precision.float32_mode(device.type)

        def run_steps(n_steps: int) -> Tensor:
            if n_steps < 1:
                raise OptionError(f"n_steps={n_steps}: ask for at least one step")
            with mode:
                return run(n_steps)

        return run_steps

    return checked


@_peer
def _torch(model, optimizer, loss_fn, batch, precision, device) -> Run:
    """A bare loop, with autocast and the scaler written out."""
    inputs, targets = batch
    scaler = precision.grad_scaler(device.type)
    mixed = _is_mixed(precision)

    def run(n_steps: int) -> Tensor:
        for _ in range(n_steps):
            with torch.autocast(device.type, dtype=precision.dtype, enabled=mixed):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


@_peer
def _amp_lab(model, optimizer, loss_fn, batch, precision, device) -> Run:
    """`training.fit`, for one epoch of that many batches: (N, C) outputs and (N) classes."""
    scaler = precision.grad_scaler(device.type)  # one for all runs, as in one training

    def run(n_steps: int) -> Tensor:
        last = None

        def recorded(outputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal last
            loss = loss_fn(outputs, targets)
            last = loss.detach()
            return loss

        fit(
            model,
            lambda epoch, first: itertools.repeat(batch, n_steps),
            optimizer=optimizer,
            precision=precision,
            device=device,
            epochs=1,
            loss_fn=recorded,
            scaler=scaler,
        )
        return last

    return run


@_peer
def _fabric(model, optimizer, loss_fn, batch, precision, device) -> Run:
    """Lightning Fabric: `setup`, and `backward` in place of the loss's own.

    Source: "Convert PyTorch code to Fabric" in its documentation.
    """
    lightning_fabric = _import("fabric", "lightning_fabric", "lightning-fabric")
    if device.type not in ("cpu", "cuda", "mps"):
        raise OptionError(f"fabric: it has no device {device.type!r}; use 'cpu', 'cuda' or 'mps'")
    if precision is Precision.FP16 and device.type == "cpu":
        raise OptionError("fabric: on a CPU it trains in bf16 when asked for fp16; ask for 'bf16'")
    inputs, targets = batch
    logger = logging.getLogger("lightning_fabric")
    level = logger.level
    logger.setLevel(logging.WARNING)  # or it tells, on stderr, which precision it was given
    try:
        fabric = lightning_fabric.Fabric(
            accelerator=device.type,
            devices=1 if device.index is None or device.type != "cuda" else [device.index],
            precision={"fp16": "16-mixed", "bf16": "bf16-mixed"}.get(precision, "32-true"),
        )
        model, optimizer = fabric.setup(model, optimizer)
    finally:
        logger.setLevel(level)

    def run(n_steps: int) -> Tensor:
        for _ in range(n_steps):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
        return loss.detach()

    return run


@_peer
def _accelerate(model, optimizer, loss_fn, batch, precision, device) -> Run:
    """Hugging Face accelerate: `prepare`, and `backward` in place of the loss's own.

    Source: "Add Accelerate to your code" in its documentation.
    """
    accelerate = _import("accelerate", "accelerate", "accelerate")
    inputs, targets = batch
    state = [{}, {}, {}]
    with _accelerate_state(state):
        accelerator = accelerate.Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=precision.value if _is_mixed(precision) else "no",
        )
        chosen = accelerator.device
        if chosen.type != device.type or (chosen.index or 0) != (device.index or 0):
            raise OptionError(
                f"accelerate: it takes device {chosen}, not {device}; ask for {chosen}"
            )
        if precision is Precision.FP16 and accelerator.scaler is None:
            raise OptionError(
                f"accelerate: on {device.type!r} it trains in fp32 when asked for fp16; "
                "ask for 'bf16'"
            )
        model, optimizer = accelerator.prepare(model, optimizer)

    def run(n_steps: int) -> Tensor:
        with _accelerate_state(state):
            for _ in range(n_steps):
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
            return loss.detach()

    return run


@_peer
def _keras(model, optimizer, loss_fn, batch, precision, device) -> Run:
    """Keras 3 on torch: a model that holds the module, `compile` and `train_on_batch`.

    The dtype policy alone does not reach into a torch module: it would cast the inputs and leave
    the weights in fp32, and the first layer would refuse them. So the policy chooses the loss
    scaling, and autocast the dtypes.

    Sources: the documentation of `keras.layers.TorchModuleWrapper` and `Model.compute_loss`.
    """
    keras = _import_keras()
    inputs, targets = batch
    mixed = _is_mixed(precision)
    autocast = functools.partial(torch.autocast, device.type, dtype=precision.dtype, enabled=mixed)

    class Holder(keras.Model):
        """The torch module as a Keras model."""

        def __init__(self):
            policies = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
            super().__init__(dtype=policies.get(precision, "float32"), autocast=False)
            self.held = keras.layers.TorchModuleWrapper(model, dtype="float32")

        def call(self, inputs):
            with autocast():
                return self.held(inputs)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            with autocast():
                return loss_fn(y_pred, y)

    with keras.device(str(device)):
        holder = Holder()
        holder.compile(_keras_optimizer(keras, optimizer, model), jit_compile=False)

    def run(n_steps: int) -> Tensor:
        with keras.device(str(device)):
            for _ in range(n_steps):
                loss = holder.train_on_batch(inputs, targets)
        return torch.as_tensor(loss, device=device).detach()

    return run


PEERS: dict[str, Build] = {
    "torch": _torch,
    "amp_lab": _amp_lab,
    "fabric": _fabric,
    "accelerate": _accelerate,
    "keras": _keras,
}
"""Builders by name: `build(model, optimizer, loss_fn, batch, precision, device)` returns `run`.

`batch` is inputs and targets; they, and `model`, are on `device` already. Model and optimizer are
the peer's from then on: accelerate changes the model's `forward`, and Keras trains the weights with
an optimizer of its own, made after the one given (its `fused` and `foreach` mean nothing there).
`run(n_steps)` trains on the batch that many times, and goes on where the last run ended. What a
library does once in a run, such as the metrics of `fit`, counts the less, the more steps there are.

Raises `OptionError` where a library is not installed, does not do what was asked, or would do
something else in its place; `DeviceError` if there is no such device.

The state of the process (environment, warning filters, random numbers, what accelerate shares, the
dtype policy and device of Keras) is the user's again after each call, and a library writes no file.
Only Keras stays on the backend that it was imported with.
"""


def _is_mixed(precision: Precision) -> bool:
    return precision in (Precision.FP16, Precision.BF16)


def _import(peer: str, module: str, package: str, group: str = "bench") -> ModuleType:
    """The library `module`; `OptionError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, but something that it needs is not
            raise
        raise OptionError(
            f"{peer}: package {package!r} is not installed; `pdm sync` installs it "
            f"(group {group!r})"
        ) from None


def _import_keras() -> ModuleType:
    """Keras, on its torch backend; `OptionError` if this process has it on another."""
    keras = sys.modules.get("keras")
    if keras is None:
        # It writes its settings, a default one too, where this variable says. `_process_kept` puts
        # the environment back.
        with tempfile.TemporaryDirectory() as home:
            os.environ.update(KERAS_BACKEND="torch", KERAS_HOME=home)
            keras = _import("keras", "keras", "keras", group="keras")
    if keras.config.backend() != "torch":
        raise OptionError(
            f"keras: this process runs it on {keras.config.backend()!r}; "
            "start another with KERAS_BACKEND=torch"
        )
    return keras


def _keras_optimizer(keras: ModuleType, optimizer: torch.optim.Optimizer, model: nn.Module):
    """Keras's optimizer that does what `optimizer` does; `OptionError` if it has none.

    Keras's Adam adds its epsilon before the correction of the second moment for its start at zero,
    torch's after: in the first steps tiny gradients move a weight less.
    """
    name = type(optimizer).__name__
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    groups = optimizer.param_groups
    if len(groups) > 1 or {id(parameter) for parameter in groups[0]["params"]} != trained:
        raise OptionError(
            f"keras: {name} must hold all trained parameters in one group, as Keras's optimizers do"
        )
    group = groups[0]
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        options = {"momentum": float(group["momentum"]), "nesterov": group["nesterov"]}
        off = ["weight_decay", "dampening", "maximize"]
    elif kind in (torch.optim.Adam, torch.optim.AdamW):
        options = {"epsilon": group["eps"], "amsgrad": group["amsgrad"]}
        options["beta_1"], options["beta_2"] = group["betas"]
        off = ["maximize"]
        if kind is torch.optim.AdamW:
            options["weight_decay"] = group["weight_decay"]
        else:  # torch's adds it to the gradients, Keras's takes it from the weights
            off.append("weight_decay")
    else:
        raise OptionError(f"keras: nothing there does what {name} does; use SGD, Adam or AdamW")
    for option in off:
        if group[option]:
            raise OptionError(
                f"keras: its {name} has no such {option}={group[option]}; leave it out"
            )
    return getattr(keras.optimizers, name)(learning_rate=group["lr"], **options)


@contextmanager
def _process_kept() -> Iterator[None]:
    """The environment, the warning filters and Python's random numbers as they were, afterwards."""
    before, random_state = dict(os.environ), random.getstate()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            random.setstate(random_state)  # Keras draws a seed from them
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


@contextmanager
def _accelerate_state(ours: list[dict]) -> Iterator[None]:
    """`ours` in place of what accelerate shares in the whole process, until the block ends.

    Its state is a singleton, with one precision for a process; each peer has its own this way.
    """
    state = importlib.import_module("accelerate.state")
    singletons = state.PartialState, state.AcceleratorState, state.GradientState
    shared = [cls._shared_state for cls in singletons]
    theirs = [dict(state) for state in shared]
    _replace(shared, ours)
    try:
        yield
    finally:
        ours[:] = [dict(state) for state in shared]
        _replace(shared, theirs)


def _replace(states: list[dict], contents: list[dict]) -> None:
    for state, content in zip(states, contents, strict=True):
        state.clear()
        state.update(content)
