"""Fake tensors on a device that is not here, and its autocast, against what is here: the CPU."""

import collections
import copy
import logging
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import needs_lstm
from small_models import Cnn, Rnn, Transformer, hooks_of, images, series, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from amp_lab import find_nonfinite, forecast_memory, xray
from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import DeviceError, TraceError
from amp_lab.model_call import ModelCall
from amp_lab.tracing import device_guard
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.fake_device import absent_device, autocast_on, on_fake_device

pytestmark = pytest.mark.slow

ATTENTION = "aten::scaled_dot_product_attention"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):  # (B, T, 8) to (B, T, 8)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def state():
    """All that a block may change for the process."""
    return {
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in BACKENDS],
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": torch.autocast_increment_nesting() - torch.autocast_decrement_nesting(),
        "modes": _get_current_dispatch_mode_stack(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "log": logging.getLogger("torch._subclasses.fake_tensor").disabled,
        "attention": [
            torch._C._dispatch_has_kernel_for_dispatch_key(ATTENTION, f"Autograd{d.upper()}")
            for d in BACKENDS
        ],
        "random": torch.get_rng_state().tolist(),
    }


def contents(model):
    """Every attribute of every module, by identity, with what its containers hold."""
    return [
        {
            name: (id(value), list(value) if isinstance(value, (list, dict, set)) else None)
            for name, value in vars(module).items()
        }
        for module in model.modules()
    ]


class Casts(TorchDispatchMode):
    """Counts the casts to another dtype."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device_type", BACKENDS)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_autocast_state_is_set_and_restored(device_type, dtype):
    before = state()
    default = torch.get_autocast_dtype(device_type)
    with autocast_on(device_type, dtype):
        assert torch.is_autocast_enabled(device_type)
        assert torch.get_autocast_dtype(device_type) is (dtype or default)
        with autocast_on(device_type, torch.bfloat16, enabled=False):
            assert not torch.is_autocast_enabled(device_type)
        assert torch.get_autocast_dtype(device_type) is (dtype or default)
        assert torch.is_autocast_enabled(device_type)
    assert state() == before
    with pytest.raises(ZeroDivisionError), autocast_on(device_type, dtype):
        1 / 0  # noqa: B018
    assert state() == before


def test_autocast_inside_the_users_own_keeps_his():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        inside = state()
        with autocast_on("cpu", torch.bfloat16):
            assert torch.is_autocast_cache_enabled()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert state() == inside
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


def test_autocast_on_the_cpu_is_torchs_own():
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with torch.autocast("cpu"):
        expected = x @ weight
    with autocast_on("cpu"):
        assert torch.equal(x @ weight, expected)


def test_casts_are_forgotten_after_the_block():
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, dtype=torch.bfloat16)
    for value in (1.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        with autocast_on("cpu"):
            assert (x @ weight)[0, 0].item() == 2 * value


@pytest.mark.parametrize("name", ["gpu", "rocm", "meta", "", "cuda:0", 0])
def test_unknown_device_is_refused_in_a_line(name):
    model, before = nn.Linear(1, 1), state()
    for block in (autocast_on(name), absent_device(name)):
        with pytest.raises(DeviceError, match="give 'cuda'") as told, block:
            pass
        assert repr(name) in str(told.value)
        assert "\n" not in str(told.value)
    with (
        pytest.raises(DeviceError),
        on_fake_device(ModelCall(model, (torch.ones(1),)), name),
    ):
        pass
    assert state() == before


@pytest.mark.parametrize("device_type", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, "fp16", float])
def test_dtype_that_autocast_does_not_take_is_refused(device_type, dtype):
    before = state()
    with (
        pytest.raises(DeviceError, match=r"give torch\.float16 or") as told,
        autocast_on(device_type, dtype),
    ):
        pass
    assert "\n" not in str(told.value)
    assert state() == before


@pytest.mark.parametrize("device_type", BACKENDS)
@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Cnn, images),
        (Transformer, tokens),
        (Rnn, series),
        (lambda: nn.GRU(5, 3, num_layers=2), lambda: torch.randn(4, 2, 5)),
        (Attention, lambda: torch.randn(2, 4, 8)),
        (lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(4, 2, 8),) * 3),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_model_runs_on_every_backend_and_nothing_is_left(device_type, model, data, enabled):
    model, x = model().train(), data()
    args = x if isinstance(x, tuple) else (x,)
    before, inside = state(), contents(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        autocast_on(device_type, enabled=enabled),
        on_fake_device(ModelCall(model, args), device_type) as run,
    ):
        output = run.output()
        outputs = output if isinstance(output, tuple) else (output,)
        assert all(o.device.type == device_type and isinstance(o, FakeTensor) for o in outputs)
        assert outputs[0].requires_grad
        assert all(p.device.type == device_type for p in run.parameters.values())
    assert (state(), contents(model)) == (before, inside)
    assert hooks_of(model) == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name])
    if enabled and isinstance(model, Rnn):
        needs_lstm(torch.bfloat16)
    with torch.autocast("cpu", enabled=enabled):
        real = model(*args)
    real = real if isinstance(real, tuple) else (real,)
    assert [o.shape for o in outputs] == [o.shape for o in real]
    if device_type == "cpu" or not enabled:
        assert [o.dtype for o in outputs] == [o.dtype for o in real]


class HookedInItsFirstCall(nn.Module):
    """A model that watches a layer of its own, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_hooked = nn.Linear(4, 4), False
        self.seen = collections.OrderedDict(first=1, second=2)

    def forward(self, x):
        if not self.is_hooked:
            self.is_hooked = True
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.seen.move_to_end("first")
            self.seen["third"] = x
        return self.layer(x)


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: xray(model, x),
        lambda model, x: xray(model, x, device_type="cpu", real=True),
        lambda model, x: forecast_memory(model, x, precision="bf16", device_type="cuda"),
        lambda model, x: find_nonfinite(model).__enter__().__exit__(None, None, None),
    ],
    ids=["xray", "xray for real", "forecast_memory", "find_nonfinite"],
)
@pytest.mark.parametrize("called_before", [False, True])
def test_a_model_that_registers_hooks_is_left_whole(look, called_before):
    """Its ordered dicts keep their order in a list of their own."""
    model, x = HookedInItsFirstCall(), torch.randn(2, 4)
    expected = copy.deepcopy(model)(x)
    if called_before:
        model(x)
    look(model, x)
    if not called_before:
        assert list(model.seen.items()) == [("first", 1), ("second", 2)]
        assert hooks_of(model) == 0
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert len(model.layer._forward_hooks) == 1
    assert list(model.seen) == ["second", "first", "third"]
    copy.deepcopy(model.seen)


def test_nothing_is_left_after_an_exception():
    class Fails(Cnn):
        def forward(self, x):
            self.features[1].running_mean.add_(1)
            self.kept = super().forward(x)
            return self.kept @ self.kept  # (B, 3) @ (B, 3)

    for device_type in BACKENDS:
        model, x = Fails(), images()
        before = state()
        inside, mean = contents(model), model.features[1].running_mean.clone()
        with (
            pytest.raises(RuntimeError, match=r"2, 3"),
            autocast_on(device_type),
            on_fake_device(ModelCall(model, (x,)), device_type) as run,
        ):
            run.output()
        assert (state(), contents(model)) == (before, inside)
        assert torch.equal(model.features[1].running_mean, mean)


def test_what_forward_keeps_is_taken_back():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last, self.log, self.by_name = nn.Linear(2, 2), None, [], {}

        def forward(self, x):
            self.last = self.linear(x)
            self.log.append(self.last)
            self.by_name["last"] = self.last
            self.new = self.last
            return self.last

    model = Keeps()
    log = model.log
    with on_fake_device(ModelCall(model, (torch.ones(1, 2),)), "cuda") as run:
        run.output()
        assert model.last is not None
    assert model.last is None
    assert model.log is log
    assert (log, model.by_name, hasattr(model, "new")) == ([], {}, False)
    assert type(model(torch.ones(1, 2))) is torch.Tensor


def test_fake_errors_are_raised_but_not_logged(caplog):
    class Wrong(nn.Module):
        def forward(self, x):
            return torch.ops.aten._upsample_bicubic2d_aa(x, [1, 1], False)

    with (
        pytest.raises(RuntimeError),
        on_fake_device(ModelCall(Wrong(), (torch.ones(2, 2),)), "cuda") as run,
    ):
        run.output()
    assert not caplog.records


def test_tied_parameters_and_shared_storage_stay_so():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("row", self.embed.weight.data[1])
            self.again = self.head

        def forward(self, x):
            return self.again(self.embed(x)) + self.head(self.row)

    model = Tied()
    with on_fake_device(ModelCall(model, (torch.tensor([1]),)), "cuda") as run:
        names = {"embed.weight", "head.weight", "again.weight"}
        assert set(run.parameters) == names
        assert len({id(run.parameters[name]) for name in names}) == 1
        weight, row = run.parameters["embed.weight"], run.buffers["row"]
        assert row.untyped_storage()._cdata == weight.untyped_storage()._cdata
        assert (row.shape, row.storage_offset()) == ((4,), 4)
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert run.output().shape == (1, 5)


def test_requires_grad_and_strides_are_kept():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    x = torch.randn(3, 4).T.requires_grad_()
    with on_fake_device(ModelCall(model, (x,)), "mps") as run:
        assert run.parameters["weight"].requires_grad
        assert not run.parameters["bias"].requires_grad
        assert run.call.args[0].requires_grad
        assert run.call.args[0].stride() == x.stride()


@pytest.mark.parametrize("device_type", BACKENDS)
def test_model_on_meta_is_welcome(device_type):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**17, 2**17), nn.BatchNorm1d(2**17))  # 64 GiB
    x = torch.empty(4, 2**17, device="meta")
    with autocast_on(device_type), on_fake_device(ModelCall(model, (x,)), device_type) as run:
        assert run.output().shape == (4, 2**17)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("device_type", BACKENDS)
def test_tensors_made_without_a_device_are_on_it(device_type):
    class Positions(nn.Module):
        def forward(self, x):
            shifted = x + torch.arange(3) + torch.tensor([1.0, 2.0, 3.0]) + torch.zeros(3)
            return shifted, torch.ones(1, device="cpu")

    with on_fake_device(ModelCall(Positions(), (torch.ones(3),)), device_type) as run:
        shifted, on_cpu = run.output()
        assert (shifted.device.type, on_cpu.device.type) == (device_type, "cpu")


def test_mismatch_of_the_models_own_making_is_told():
    class Mixed(nn.Module):
        def forward(self, x):
            return x + torch.ones(3, device="cpu")

    with (
        pytest.raises(RuntimeError, match=r"cuda:0.* cpu"),
        on_fake_device(ModelCall(Mixed(), (torch.ones(3),)), "cuda") as run,
    ):
        run.output()


@pytest.mark.parametrize("device_type", BACKENDS)
def test_weight_is_cast_once(device_type):
    class Five(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            for _ in range(5):
                x = x @ self.weight
            return x

    low = torch.get_autocast_dtype(device_type)
    counter = Casts()
    with (
        autocast_on(device_type),
        on_fake_device(ModelCall(Five(), (torch.ones(2, 4, dtype=low),)), device_type) as run,
        counter,
    ):
        assert run.output().dtype is low
    assert counter.count == 1


@dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    extra: dict


def test_inputs_in_structures_are_faked_and_kept():
    class Takes(nn.Module):
        def forward(self, batch, *, scale, names):
            return batch.image * batch.extra["mask"][0] * scale["x"], names

    x = torch.ones(2, 3)
    batch = Batch(x, {"mask": [x, "text"]})
    kwargs = {"scale": {"x": torch.tensor(2.0)}, "names": ["a"]}
    with on_fake_device(ModelCall(Takes(), (batch,), kwargs), "xpu") as run:
        output, names = run.output()
        assert (output.device.type, output.shape, names) == ("xpu", (2, 3), ["a"])
        assert run.call.args[0].image is run.call.args[0].extra["mask"][0]
        assert run.fake(x) is run.call.args[0].image
    assert batch.image is x
    assert batch.extra["mask"] == [x, "text"]


def test_models_without_a_fake_copy_are_refused():
    sparse = nn.Linear(2, 2)
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        script = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
        lazy = nn.LazyLinear(2)
    for model, words in ((lazy, "no shape yet"), (sparse, "sparse"), (script, "TorchScript")):
        before = state()
        with (
            pytest.raises(TraceError, match=words) as told,
            on_fake_device(ModelCall(model, (torch.ones(1, 2),)), "cuda"),
        ):
            pass
        assert "\n" not in str(told.value)
        assert state() == before


def test_blocks_for_an_absent_device_nest():
    for device_type in BACKENDS:
        before = state()
        with absent_device(device_type), absent_device(device_type):
            inside = state()
            with absent_device(device_type):
                pass
            assert state() == inside
            with StrictFakeMode():
                x = torch.ones(2, 2, device=device_type, requires_grad=True)
                x.detach().copy_(x)
                assert (x @ x).requires_grad
        assert state() == before


def test_cuda_can_be_done_without_where_torch_was_built_without_it():
    """As in the builds for macOS; there the place of CUDA's device guard is empty."""
    script = """
import ctypes, sys, torch
from pathlib import Path
name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
guards[1] = None
torch.backends.cuda.is_built = lambda: False

from amp_lab import xray
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
found = xray(torch.nn.Sequential(layer, torch.nn.Linear(16, 8)), torch.zeros(2, 4, 16))
assert found.output_dtypes == [torch.float16]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("device_type", "is_built", "advice"),
    [("cuda", False, "'cpu'"), ("xpu", False, "'cpu'"), ("xpu", True, "'cuda' or 'cpu'")],
)
def test_without_a_table_of_guards_only_devices_that_work_are_advised(
    monkeypatch, device_type, is_built, advice
):
    """As on Windows; a torch that was built with CUDA needs no guard from us for it."""
    monkeypatch.setattr(device_guard, "_REGISTRY", "not_in_libc10")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(DeviceError, match=f"'{device_type}'.*Give {advice}$"):
        xray(layer, x, device_type=device_type)
    xray(layer, x, device_type="cpu")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
def test_cuda_needs_no_table_of_guards_if_torch_was_built_for_it(monkeypatch):
    monkeypatch.setattr(device_guard, "_REGISTRY", "not_in_libc10")
    xray(nn.Linear(2, 2), torch.ones(1, 2), device_type="cuda")
