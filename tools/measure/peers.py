"""Measure what other libraries' loops cost: `python tools/measure/peers.py --out FILE`.

Each trains ResNet-18 on one batch (the part "peers") or gpt-nano on one batch of text ("text") in
the same precision, as its documentation says: a bare loop ("torch"), `amp_lab.fit`, Lightning
Fabric, accelerate, and Keras 3 on torch; the dependency groups `bench` and `keras` have the last
three. With text there is also a step as nanoGPT has it, which clips gradients, and each bare loop
and ours with a compiled model. The part "recommended" holds what `amp_lab.advise` recommends for
training three models against Fabric's and accelerate's loops in bf16.

They take turns, and a ratio is the median over the rounds of a library's time over that of the
first in the same round, the bare loop or Fabric: a machine that slows down slows both. A library
that is not installed, or would train in another precision than it was asked to, is recorded as
"not run", and one that fails as "failed".
"""

import copy
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amp_lab import advise
from amp_lab.core.device import describe_device, pick_device
from amp_lab.core.errors import OptionError, first_line
from amp_lab.core.precision import Precision
from amp_lab.core.timing import Rounds, allocated_bytes, is_out_of_memory, measure
from amp_lab.core.timing_result import Comparison
from amp_lab.model_call import ModelCall
from amp_lab.models.build import build_model
from amp_lab.recipes import TRAINING, Step
from amp_lab.train.loop import cross_entropy, fit
from recording import parser, record
from training import adamw, make_step

Batch = tuple[Tensor, Tensor]  # images (N, 3, H, W), classes (N)
Run = Callable[[int], None]  # runs that many training steps, and continues where it ended before
VOCABULARY = 105  # characters of the standard library, as in `amp-lab train`
CONTEXT = 256
MIXED = (Precision.FP16, Precision.BF16)


@dataclass
class PeerRow:
    """One library's training step."""

    peer: str
    workload: str
    precision: str
    status: str  # ``ok``, ``failed``, ``out of memory`` or ``not run``
    trusted: bool = False  # whether the machine was quiet
    reason: str = ""  # why it is not ok, or not trusted
    samples_s: list[float] = field(default_factory=list)  # seconds of a step, by round
    disturbed: int = 0  # rounds in which something else used the machine
    ratio: float | None = None  # of this time over the bare loop's: median over the rounds
    interval: list[float] | None = None  # 95 % interval of it
    peak_bytes: int | None = None


def torch_loop(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """A bare loop, with autocast and the scaler written out."""
    return _repeat(make_step(model, adamw(model), *batch, precision, device))


def amp_lab_fit(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """`amp_lab.fit`, for one epoch of that many batches."""
    optimizer = adamw(model)
    scaler = precision.grad_scaler(device.type)  # one for all runs, as in one training
    run_epoch = functools.partial(
        fit, optimizer=optimizer, scaler=scaler, precision=precision, device=device, epochs=1
    )

    def run(n_steps: int) -> None:
        run_epoch(model, lambda epoch, first: itertools.repeat(batch, n_steps))

    return run


def fabric(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """Lightning Fabric, after "Convert PyTorch code to Fabric" in its documentation."""
    from lightning_fabric import Fabric

    if device.type not in ("cpu", "cuda", "mps"):
        raise OptionError(f"fabric has no device {device.type!r}")
    if precision is Precision.FP16 and device.type == "cpu":
        raise OptionError("on a CPU fabric trains in bf16 when asked for fp16")
    mixed: dict[str, Literal["16-mixed", "bf16-mixed"]] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    launcher = Fabric(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=mixed.get(precision, "32-true"),
    )
    trained, optimizer = launcher.setup(model, adamw(model))
    return _loop(trained, batch, optimizer, launcher.backward)


def accelerate(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """Hugging Face accelerate, after "Add Accelerate to your code" in its documentation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # It has one precision for a process, and would keep the one that was measured before.
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = precision.value if precision in MIXED else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed)
    if accelerator.device.type != device.type:
        raise OptionError(f"accelerate takes device {accelerator.device}, not {device}")
    if precision is Precision.FP16 and accelerator.scaler is None:
        raise OptionError(f"on {device.type!r} accelerate trains in fp32 when asked for fp16")
    trained, optimizer = accelerator.prepare(model, adamw(model))
    return _loop(trained, batch, optimizer, accelerator.backward)


def nanogpt(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """A step after nanoGPT's `train.py`: the bare loop's, with gradients clipped to a norm of 1."""
    inputs, targets = batch
    optimizer = adamw(model)
    scaler = precision.grad_scaler(device.type)
    autocast = functools.partial(
        torch.autocast, device.type, precision.dtype, enabled=precision in MIXED
    )

    def step() -> None:
        with autocast():
            loss = cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return _repeat(step)


def compiled(peer: Callable[..., Run]) -> Callable[..., Run]:
    """A peer that trains a compiled model."""

    def run(model: nn.Module, *how: Any) -> Run:
        model.compile()
        return peer(model, *how)

    return run


def recommended(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """What `advise` recommends for this training; it may choose another precision."""

    def loss_fn(output: Any) -> Tensor:
        return cross_entropy(output, batch[1])

    inputs, _ = batch
    copied = copy.deepcopy(model)
    advice = advise(copied, inputs, minutes=2, loss_fn=loss_fn, device=device)
    call = ModelCall(model, (inputs,), loss_fn=loss_fn)
    return _repeat(Step(call, advice.chosen[TRAINING].recipe, device))


def _loop(model: nn.Module, batch: Batch, optimizer, backward: Callable[[Tensor], object]) -> Run:
    """The loop that Fabric and accelerate share.

    A step frees the gradients at its end, as in the bare loop. A loop that keeps them during the
    turns of the others need not allocate them in its next turn, and was 6 % faster for that alone.
    """

    def step() -> None:
        backward(cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    return _repeat(step)


def _repeat(step: Callable[[], object]) -> Run:
    """A function that calls the step as many times as it is told."""

    def run(n_steps: int) -> None:
        for _ in range(n_steps):
            step()

    return run


def keras(model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> Run:
    """Keras 3 on torch: a model that holds the module, `compile` and `train_on_batch`.

    The dtype policy does not reach into a torch module: it would cast the inputs alone, and the
    first layer would refuse them. So the policy chooses the loss scaling, and autocast the dtypes.
    Sources: the documentation of `keras.layers.TorchModuleWrapper` and `Model.compute_loss`.
    """
    os.environ["KERAS_BACKEND"] = "torch"  # read once, when Keras is imported
    import keras

    settings = {"dtype": precision.dtype, "enabled": precision in MIXED}
    autocast = functools.partial(torch.autocast, device.type, **settings)

    class Holder(keras.Model):
        def __init__(self):
            policies = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
            super().__init__(dtype=policies.get(precision, "float32"), autocast=False)
            self.held = keras.layers.TorchModuleWrapper(model, dtype="float32")

        def call(self, inputs):
            with autocast():
                return self.held(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is not None  # None is only there for Keras's own signature
            assert y_pred is not None
            with autocast():
                return cross_entropy(y_pred, y)

    group = adamw(model).param_groups[0]
    # Keras adds epsilon before Adam's correction for its start at zero, torch after it: in the
    # first steps tiny gradients move a weight less. No step takes longer for that.
    optimizer = keras.optimizers.AdamW(group["lr"], group["weight_decay"], epsilon=group["eps"])
    with keras.device(str(device)):
        holder = Holder()
        holder.compile(optimizer, jit_compile=False)

    def run(n_steps: int) -> None:
        with keras.device(str(device)):
            for _ in range(n_steps):
                holder.train_on_batch(*batch)

    return run


PEERS = {
    "torch": torch_loop,
    "amp_lab": amp_lab_fit,
    "fabric": fabric,
    "accelerate": accelerate,
    "keras": keras,
}
TEXT_PEERS = {name: PEERS[name] for name in ("torch", "amp_lab", "fabric", "accelerate")} | {
    "nanogpt": nanogpt,
    "torch, compiled": compiled(torch_loop),
    "amp_lab, compiled": compiled(amp_lab_fit),
    "nanogpt, compiled": compiled(nanogpt),
}

ADVISED = {"fabric": fabric, "accelerate": accelerate, "recommended": recommended}


def measure_peers(
    name: str,
    peers: dict[str, Callable[..., Run]],
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    *,
    precisions: list[Precision],
    rounds: int,
) -> Iterator[dict]:
    """A `PeerRow` for each library and precision, as plain values; `name` is the model's."""
    shape = "x".join(map(str, batch[0].shape))
    title = f"{name} {shape}"
    for precision in precisions:
        rows = [PeerRow(peer, title, str(precision), "ok") for peer in peers]
        ready: list[tuple[PeerRow, Run]] = []  # the rows of peers that can run
        for row in rows:
            own_model = copy.deepcopy(model)
            make = functools.partial(peers[row.peer], own_model, batch, precision, device)
            run = _prepare(row, make, precision, device)
            if run is not None:
                ready.append((row, run))
        compared = _compare(ready, precision, device, rounds)
        first = rows[0].peer  # such as the bare loop; a ratio is relative to its time
        for row, _ in ready:
            row.samples_s = list(compared.samples_s[row.peer])
            row.disturbed = compared.disturbed
            row.trusted = compared.trusted
            row.reason = compared.reason
            if first in compared.samples_s:  # it has not failed
                ratio = compared.ratio(row.peer, first)
                row.ratio = ratio.median
                row.interval = list(ratio.interval)
        yield from map(asdict, rows)


def _compare(
    ready: list[tuple[PeerRow, Run]], precision: Precision, device: torch.device, rounds: int
) -> Comparison:
    """Time the peers in turns, for this many rounds."""
    timed_rounds = Rounds(device)
    order = list(ready)
    for _ in range(rounds):
        with timed_rounds.next() as seconds:  # a dict to fill: the seconds of a step by peer
            for row, run in order:
                seconds[row.peer], _ = _time(run, precision, device)
        order.reverse()  # so that no peer is always first
    return timed_rounds.comparison([row.peer for row, _ in ready])


def _prepare(
    row: PeerRow, make: Callable[[], Run], precision: Precision, device: torch.device
) -> Run | None:
    """Make the peer of a row and run it once; return None if it fails, with the reason in the row.

    Writes the peak memory of this run into the row.
    """
    bytes_before = allocated_bytes(device)  # of the peers that were prepared earlier
    try:
        run = make()
        _, peak_bytes = _time(run, precision, device)
    except (OptionError, ModuleNotFoundError) as error:
        row.status = "not run"
        row.reason = str(error)
        return None
    except RuntimeError as error:
        row.status = "out of memory" if is_out_of_memory(error) else "failed"
        row.reason = first_line(error)
        return None
    if peak_bytes is not None:
        row.peak_bytes = peak_bytes - bytes_before
    return run


def _time(run: Run, precision: Precision, device: torch.device) -> tuple[float, int | None]:
    """Seconds of a step, and the peak memory; None if the device keeps no count of memory.

    Several steps run in a row, so that what a library does once for all of them counts less.
    """
    steps = 2 if device.type == "cpu" else 10
    # On an accelerator `measure` empties the cache of memory, which the warm-up fills again.
    warmup = 0 if device.type == "cpu" else 1
    # IEEE for fp32 and TF32 for tf32. No library sets this for the backward pass.
    with precision.float32_mode(device.type):
        measured = measure(lambda: run(steps), device=device, warmup=warmup, repeats=1)
    return measured.samples_s[0] / steps, measured.peak_bytes


def main() -> None:
    """Measure the peers in fp32 and what the device accelerates; print and write each row."""
    options_parser = parser(__doc__, ("peers", "text", "recommended"))
    rounds = "turns (default: 16; fewer than 12 undisturbed ones are not trusted)"
    options_parser.add_argument("--rounds", type=int, default=16, help=rounds)
    options = options_parser.parse_args()
    device = pick_device()
    precisions = [Precision.FP32, *describe_device(device).accelerated]
    on_cpu = device.type == "cpu"

    def compare_peers(
        name: str,
        peers: dict[str, Callable[..., Run]],
        batch: Batch,
        precisions: list[Precision] = precisions,
    ) -> Iterator[dict]:
        classes = VOCABULARY if name == "gpt-nano" else 10
        model = build_model(name, classes).to(device)
        return measure_peers(
            name, peers, model, batch, device, precisions=precisions, rounds=options.rounds
        )

    def images(count: int, size: int) -> Batch:
        pixels = torch.randn(count, 3, size, size)
        classes = torch.arange(count) % 10
        return pixels.to(device), classes.to(device)

    def passages() -> Batch:
        count = 8 if on_cpu else 64
        tokens = torch.randint(VOCABULARY, (count, CONTEXT + 1)).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def peers() -> Iterator[dict]:
        batch = images(64, 32) if on_cpu else images(256, 224)
        return compare_peers("resnet18", PEERS, batch)

    def text() -> Iterator[dict]:
        return compare_peers("gpt-nano", TEXT_PEERS, passages())

    def advised() -> Iterator[dict]:
        bf16 = [Precision.BF16]
        for name in ("resnet50", "mobilenet_v2"):
            batch = images(8 if on_cpu else 64, 224)
            yield from compare_peers(name, ADVISED, batch, bf16)
        yield from compare_peers("gpt-nano", ADVISED, passages(), bf16)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERAS_HOME"] = folder  # or Keras would write its settings into the user's home
        parts = {"peers": peers, "text": text, "recommended": advised}
        record(parts, options, device, rounds=options.rounds)


if __name__ == "__main__":
    main()
