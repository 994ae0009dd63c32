"""The same training through other libraries: it ends with the same weights, and leaves no trace."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_lab import peers
from amp_lab.errors import AmpLabError, OptionError
from amp_lab.peers import PEERS
from amp_lab.training.loop import cross_entropy

MODULES = {"fabric": "lightning_fabric", "accelerate": "accelerate", "keras": "keras"}
PRECISIONS = ["fp32", "bf16", "fp16"]
REFUSE_FP16 = {"fabric": "bf16", "accelerate": "fp32"}  # on a CPU; what they would do instead
STEPS = 5

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


def group(name: str) -> str:
    return "keras" if name == "keras" else "bench"


def need(*names: str) -> None:
    """Skip where a library is not installed, as in the images. (Keras may not be imported yet.)"""
    for name in names:
        if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            pytest.skip(f"no {MODULES[name]}: the group {group(name)!r} is not installed")


@pytest.fixture(params=PEERS)
def peer(request) -> str:
    need(request.param)
    return request.param


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 6, 6, generator=generator)
    return images, torch.randint(4, (8,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Powers of two, so that the products are exact, in whichever order a library takes them.
    return torch.optim.SGD(model.parameters(), lr=2**-3, momentum=2**-1)


def build(name: str, model: nn.Module, precision: str, make_optimizer=sgd, loss_fn=cross_entropy):
    return PEERS[name](model, make_optimizer(model), loss_fn, make_batch(), precision, "cpu")


def train(name: str, precision: str, make_optimizer=sgd) -> tuple[nn.Module, torch.Tensor]:
    """The model after STEPS steps in two runs, and the losses at the ends of the runs."""
    model = make_model().eval()  # a builder puts it into training mode
    run = build(name, model, precision, make_optimizer)
    return model, torch.stack([run(2), run(STEPS - 2)])


def farthest(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of two numbers in their states."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def bare_loop(precision: str) -> tuple[nn.Module, torch.Tensor]:
    """The same training written here once more, after PyTorch's own examples."""
    model, (images, targets) = make_model(), make_batch()
    optimizer = sgd(model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return model, torch.stack([losses[1], losses[-1]])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_end_with_the_same_weights_and_losses(peer, precision):
    if precision == "fp16" and peer in REFUSE_FP16:
        pytest.skip("it refuses fp16 on a CPU, to which a test below holds it")
    expected, expected_losses = bare_loop(precision)
    model, losses = train(peer, precision)
    assert farthest(model, expected) == 0
    assert torch.equal(losses, expected_losses)
    assert losses[1] < losses[0] / 2  # it is a training, and in this precision, not in another
    assert farthest(model, bare_loop("bf16" if precision == "fp32" else "fp32")[0]) > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        # Keras's Adam has its epsilon in another place (the "epsilon hat" of Kingma and Ba), so it
        # must be too small here to count.
        (torch.optim.Adam, {"eps": 1e-14}),
        (torch.optim.AdamW, {"eps": 1e-14, "weight_decay": 0.1}),
    ],
    ids=["nesterov", "adam", "adamw"],
)
def test_other_optimizers_and_frozen_weights(peer, kind, options):
    lr = 1e-2

    def make_optimizer(model):
        model[0].requires_grad_(False)
        return kind([p for p in model.parameters() if p.requires_grad], lr=lr, **options)

    expected, _ = train("torch", "fp32", make_optimizer)
    model, losses = train(peer, "fp32", make_optimizer)
    # Keras rounds in another order, and computes Adam's 1 - 0.999 ** step in fp32, which leaves
    # five digits: 1e-5 of what a weight is moved by, and that is about lr in a step.
    allowed = 1e-5 * STEPS * lr if peer == "keras" else 0
    assert farthest(model, expected) <= allowed
    assert losses[1] < losses[0]
    assert torch.equal(model[0].weight, make_model()[0].weight)


def test_runs_in_turn_do_not_disturb_each_other(peer):
    """As a benchmark calls them: every step in another precision."""
    models, runs = {}, {}
    for precision in ("fp32", "bf16"):
        models[precision] = make_model()
        runs[precision] = build(peer, models[precision], precision)
    for _ in range(STEPS):
        for run in runs.values():
            run(1)
    for precision, model in models.items():
        assert farthest(model, train(peer, precision)[0]) == 0


def test_fp32_is_ieee_in_both_passes_and_the_users_mode_comes_back(peer):
    matmul = torch.backends.mkldnn.matmul
    seen = []
    model = make_model()
    model[4].weight.register_hook(lambda grad: seen.append(matmul.fp32_precision))

    def loss_fn(outputs, targets):
        seen.append(matmul.fp32_precision)
        return cross_entropy(outputs, targets)

    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        build(peer, model, "fp32", loss_fn=loss_fn)(2)
        after = matmul.fp32_precision
    finally:
        matmul.fp32_precision = before
    assert seen == ["ieee"] * 4
    assert after == "bf16"


def test_an_accelerator_of_the_users_own_stays():
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    own = Accelerator(cpu=True, mixed_precision="no")
    try:
        run = build("accelerate", make_model(), "bf16")
        assert own.mixed_precision == "no"
        run(1)
        assert own.mixed_precision == "no"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


TRACELESS = """
import logging, os, random, socket, sys, warnings

def refuse(*arguments):
    raise AssertionError(f"a connection to {arguments}")

socket.socket.connect = socket.getaddrinfo = refuse

import numpy as np
import torch
from torch import nn
from amp_lab.peers import PEERS
from amp_lab.precision import _FLOAT32_MODES
from amp_lab.training.loop import cross_entropy

assert not {"keras", "accelerate", "lightning_fabric"} & set(sys.modules)

def state():
    found = {
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "hooks": (sys.excepthook, warnings.showwarning),
        "log": (list(logging.root.handlers), logging.root.level),
        "dtype, device": (torch.get_default_dtype(), torch.get_default_device()),
        "matmul": torch.get_float32_matmul_precision(),
        "float32": [mode.fp32_precision for mode in _FLOAT32_MODES],
        "switches": (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()),
        "random": [hash(str(state)) for state in
            (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state())],
    }
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState
        for kind in AcceleratorState, GradientState, PartialState:
            found[kind.__name__] = dict(kind._shared_state)
    if "keras" in sys.modules:
        import keras
        from keras.src.backend.torch.core import get_device
        found["keras"] = (keras.config.dtype_policy().name, keras.config.floatx(), get_device())
    return found

for name in PEERS:
    for precision in "fp32", "bf16":
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        before = state()
        run = PEERS[name](model, optimizer, cross_entropy, batch, precision, "cpu")
        run(2)
        after = state()
        before = {key: {} if key.endswith("State") else after[key] for key in after} | before
        for key in after:
            assert after[key] == before[key], (name, precision, key, before[key], after[key])
"""


def test_nothing_is_left_behind(tmp_path):
    """No output, file, warning, connection or changed setting, in a process of its own."""
    need(*MODULES)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERAS", "XDG"))}
    home, caches = tmp_path / "home", str(tmp_path / "caches")
    home.mkdir()
    # Matplotlib and torch keep caches, whoever imports them.
    environment |= {"MPLCONFIGDIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRACELESS],
        env=environment | {"HOME": str(home), "TMPDIR": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert list(home.iterdir()) == []


def one_line(error: pytest.ExceptionInfo) -> str:
    assert isinstance(error.value, AmpLabError)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_library_says_what_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # what `import` then calls not found
    model = make_model()
    sgd(model)  # a process's first optimizer loads much of torch, which sets a variable
    environment = dict(os.environ)
    with pytest.raises(OptionError, match=f"{name}: .* is not installed; `pdm sync`") as error:
        build(name, model, "fp32")
    assert f"(group {group(name)!r})" in one_line(error)
    assert dict(os.environ) == environment


def test_keras_on_another_backend_is_refused(monkeypatch):
    other = SimpleNamespace(config=SimpleNamespace(backend=lambda: "tensorflow"))
    monkeypatch.setitem(sys.modules, "keras", other)
    with pytest.raises(OptionError, match="'tensorflow'; start another") as error:
        build("keras", make_model(), "fp32")
    one_line(error)


@pytest.mark.parametrize(("name", "instead"), REFUSE_FP16.items())
def test_fp16_on_a_cpu_is_refused_where_it_would_be_another(name, instead):
    need(name)
    with pytest.raises(OptionError, match=f"trains in {instead} when asked for fp16") as error:
        build(name, make_model(), "fp16")
    one_line(error)


@pytest.mark.parametrize(
    ("name", "device", "what"),
    [("fabric", "xpu", "has no device 'xpu'"), ("accelerate", "cuda:1", "takes device")],
)
def test_a_device_that_it_would_not_use_is_refused(name, device, what, monkeypatch):
    need(name)
    monkeypatch.setattr(peers, "require_backend", lambda device_type: None)
    model = make_model()
    with pytest.raises(OptionError, match=what) as error:
        PEERS[name](model, sgd(model), cross_entropy, make_batch(), "fp32", device)
    one_line(error)


@pytest.mark.parametrize(
    ("make_optimizer", "what"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop"),
        (lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()]), "in one group"),
        (lambda m: torch.optim.SGD(m[4].parameters()), "all trained parameters"),
        (lambda m: torch.optim.SGD(m.parameters(), weight_decay=0.1), "weight_decay=0.1"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "weight_decay=0.1"),
        (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), "maximize=True"),
    ],
)
def test_an_optimizer_that_keras_has_not_is_refused(make_optimizer, what):
    need("keras")
    with pytest.raises(OptionError, match=what) as error:
        build("keras", make_model(), "fp32", make_optimizer)
    one_line(error)


def test_no_steps_is_a_mistake(peer):
    run = build(peer, make_model(), "fp32")
    with pytest.raises(OptionError, match="n_steps=0") as error:
        run(0)
    one_line(error)
