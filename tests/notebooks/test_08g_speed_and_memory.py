"""What notebook 08g and its table of other failures state without an assertion beside it."""

import inspect
import io
import re
import tomllib
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import write_failures
from amp_lab import forecast_memory
from amp_lab.failures import read_explanation
from amp_lab.failures.patterns import flat, pattern
from amp_lab.failures.reference import reference_from

ROWS = {
    row["code"]: row
    for row in tomllib.loads(
        (write_failures.OTHERS / "08g_speed_and_memory.toml").read_text(encoding="utf-8")
    )["failure"]
}
OUT_OF_MEMORY = {
    "torch 1.13": (
        "RuntimeError: CUDA out of memory. Tried to allocate 4.16 GiB (GPU 0; 10.76 GiB total "
        "capacity; 2.82 GiB already allocated; 4.18 GiB free; 4.33 GiB reserved in total)"
    ),
    "torch 2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 "
        "GiB total capacity; 7.06 GiB already allocated; 0 bytes free; 7.29 GiB reserved in total "
        "by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
    ),
    "torch 2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a "
        "total capacty of 6.00 GiB of which 0 bytes is free."
    ),
    "torch 2.5": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a "
        "total capacity of 15.77 GiB of which 514.19 MiB is free. Process 5 has 15.25 GiB in use."
    ),
    "the class alone": "torch.OutOfMemoryError",
    "ROCm": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "XPU": "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB.",
    "MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 "
        "GB, max allowed: 32.00 GB). Tried to allocate 129.21 MB on private pool."
    ),
    "the driver": "RuntimeError: CUDA error: out of memory",
    "very old": "RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:58",
    "cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        "memory)"
    ),
    "Windows": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough "
        "memory: you tried to allocate 4096 bytes."
    ),
}


@pytest.fixture(scope="module")
def reference():
    return reference_from(write_failures.reference())


def is_quoted(code: str, message: str) -> bool:
    """Whether a pattern of the row `code` matches the message."""
    patterns = [pattern(code, quoted).regex for quoted in ROWS[code]["quoted"]]
    return any(re.search(regex, flat(message), re.IGNORECASE) for regex in patterns)


@pytest.mark.parametrize("wording", OUT_OF_MEMORY)
def test_each_wording_of_out_of_memory_is_found(reference, wording):
    found = read_explanation(OUT_OF_MEMORY[wording], reference)
    assert found.by_message
    assert found.failures[0].code == "AMP0045"


def test_the_cpu_runs_out_of_memory_in_the_words_that_are_quoted(reference):
    with pytest.raises(RuntimeError, match="you tried to allocate") as error:
        torch.empty(2**50)
    assert read_explanation(str(error.value), reference).failures[0].code == "AMP0045"


@pytest.mark.parametrize(
    ("traceback", "code"),
    [
        (
            'File "/venv/torch/optim/adam.py", line 179, in _init_group\n'
            '    state["exp_avg"] = torch.zeros_like(\n                       ^^^^^^^^^^^^^^^^^',
            "AMP0172",
        ),
        (
            'File "/venv/torch/serialization.py", line 669, in _deserialize\n'
            "    return obj.to(device=device)\n           ^^^^^^^^^^^^^^^^^^^^^\n"
            '  File "/venv/torch/storage.py", line 298, in to\n'
            "    return _to(self, device, non_blocking)\n           ^^^^^^^^^^\n"
            '  File "/venv/torch/_utils.py", line 108, in _to\n'
            "    untyped_storage = torch.UntypedStorage(self.size(), device=device)",
            "AMP0141",
        ),
        ('File "modeling_llama.py", line 1, in forward\n    logits = logits.float()', "AMP0179"),
        (
            'File "/venv/torch/nn/functional.py", line 3494, in cross_entropy\n'
            "    return torch._C._nn.cross_entropy_loss(\n           ^^^^^^^^^^^^^^^",
            "AMP0179",
        ),
        (
            'File "/venv/transformers/trainer_pt_utils.py", line 86, in torch_pad_and_concatenate\n'
            "    return torch.cat((tensor1, tensor2), dim=0)",
            "AMP0170",
        ),
    ],
)
def test_the_last_line_of_a_traceback_says_why_memory_ran_out(reference, traceback, code):
    text = f"{traceback}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert read_explanation(text, reference).failures[0].code == code


def test_the_code_lines_that_these_patterns_quote_are_in_torch():
    for where, line in (
        (torch.optim.Adam, 'state["exp_avg"] = torch.zeros_like('),
        (torch.optim.Adam, 'state["exp_avg_sq"] = torch.zeros_like('),
        (torch.serialization, "return obj.to(device=device)"),
        (torch.storage, "return _to(self, device, non_blocking)"),
        (nn.functional, "torch._C._nn.cross_entropy_loss("),
    ):
        assert line in inspect.getsource(where)


def test_transformers_concatenates_the_outputs_of_an_evaluation():
    utils = pytest.importorskip("transformers.trainer_pt_utils", exc_type=ImportError)
    assert "return torch.cat((tensor1, tensor2), dim=0)" in inspect.getsource(utils)


def test_without_cuda_or_with_fp32_autocast_and_the_scaler_are_disabled(monkeypatch):
    """AMP0031."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda.amp.common, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        block = torch.autocast("cuda")
    with block:
        assert not torch.is_autocast_enabled("cuda")
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available"):
        scaler = torch.amp.GradScaler("cuda")
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1
    for device_type in ("cpu", "xpu", "mps"):
        with pytest.warns(UserWarning, match="the target dtype is not supported"):
            block = torch.autocast(device_type, dtype=torch.float32)
        with block:
            assert not torch.is_autocast_enabled(device_type)


@pytest.mark.parametrize("device_type", ["xpu", "mps"])
def test_without_such_a_device_autocast_and_the_scaler_stay_on_in_silence(device_type):
    """AMP0031."""
    x = torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.amp.GradScaler(device_type).is_enabled()
        with torch.autocast(device_type, dtype=torch.float16):
            assert torch.is_autocast_enabled(device_type)
            assert not torch.is_autocast_enabled(x.device.type)
            assert (x @ x).dtype is torch.float32


def test_data_parallel_enters_autocast_without_a_dtype():
    """AMP0032."""
    source = inspect.getsource(nn.parallel.parallel_apply)
    (block,) = re.findall(r"autocast\([^)]*enabled=autocast_enabled[^)]*\)", source)
    assert "dtype" not in block
    assert "threading.Thread(" in source
    assert torch.get_autocast_dtype("cuda") is torch.float16


def test_adam_takes_16_bytes_a_parameter_and_half_of_them_from_the_first_step_on():
    """AMP0172 and AMP0034."""
    model = nn.Linear(8, 8)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    assert not adam.state
    adam.step()
    moments = [t for state in adam.state.values() for t in state.values() if t.dim() > 0]
    numbers = sum(p.numel() for p in model.parameters())
    assert sum(t.nbytes for t in moments) == 8 * numbers
    kept = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    assert sum(t.nbytes for t in kept) == 16 * numbers
    amsgrad = torch.optim.Adam(model.parameters(), amsgrad=True)
    amsgrad.step()
    moments = [t for state in amsgrad.state.values() for t in state.values() if t.dim() > 0]
    assert sum(t.nbytes for t in moments) == 12 * numbers


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_with_a_small_batch_bf16_does_not_save_memory(optimizer):
    """AMP0034."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    fp32, bf16 = (
        forecast_memory(model, torch.empty(4, 1024), precision=precision, optimizer=optimizer).peak
        for precision in ("fp32", "bf16")
    )
    if optimizer == "adam":
        assert bf16 == pytest.approx(fp32, rel=1e-2)
    else:
        assert bf16 > fp32


def test_equal_batches_accumulate_the_gradient_of_the_whole_batch():
    """AMP0045."""
    model, x = nn.Linear(4, 1), torch.arange(32.0).view(8, 4)
    whole = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
    for part in x.chunk(2):
        (model(part).square().mean() / 2).backward()
    torch.testing.assert_close(model.weight.grad, whole)


def test_foreach_is_the_default_on_cuda_and_xpu():
    """AMP0172."""
    devices = torch.utils._foreach_utils._get_foreach_kernels_supported_devices()
    assert {"cuda", "xpu"} <= set(devices)
    assert "mps" not in devices


def test_on_rocm_bf16_counts_as_supported_even_without_emulation(monkeypatch):
    """AMP0176."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert torch.cuda.is_bf16_supported(including_emulation=False)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_the_dtype_of_the_model_unless_it_assigns(assign):
    """AMP0092."""
    model = nn.Linear(2, 2)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert model.weight.dtype is (torch.bfloat16 if assign else torch.float32)


def test_a_checkpoint_is_loaded_to_where_map_location_says():
    """AMP0141: `meta` stands for a GPU, on which a tensor without `map_location` would be again."""
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.load(file, map_location="meta").device.type == "meta"
    file.seek(0)
    assert torch.load(file).device.type == "cpu"
    assert "map_location" in torch.load.__doc__


def fp8(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float8_e4m3fn, device="meta")


def scale(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "scale_a", "scale_b"),
    [
        (fp8(32, 64), fp8(64, 64).t(), scale(32), scale(64)),
        (fp8(32, 64), fp8(64, 64).t(), scale(32, 1), scale(64, 1)),
        (fp8(32, 64), fp8(64, 64).t(), scale(), scale(dtype=torch.bfloat16)),
        (fp8(32, 64), fp8(64, 64).t(), scale(32, 1, dtype=torch.bfloat16), scale(1, 64)),
        (fp8(32, 64), fp8(64, 64).t(), scale(64, 1).t()[:, ::2].t(), scale(1, 64)),
        (fp8(32, 64), fp8(64, 64), scale(), scale()),
        (fp8(64, 32).t(), fp8(64, 64).t(), scale(), scale()),
        (fp8(32, 64), fp8(64, 64).t(), *[scale(7, dtype=torch.float8_e8m0fnu)] * 2),
        (fp8(32, 64), fp8(64, 64).t().bfloat16(), scale(), scale()),
    ],
)
def test_an_fp8_matmul_refuses_scales_and_layouts_in_the_words_that_are_quoted(
    left, right, scale_a, scale_b
):
    """AMP0175."""
    with pytest.raises(RuntimeError) as error:
        torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=torch.bfloat16)
    assert is_quoted("AMP0175", str(error.value)), str(error.value)


def test_the_fp8_gradient_of_a_weight_needs_tokens_in_a_multiple_of_16():
    """AMP0044: the tokens are the inner size of this matmul."""

    def weight_gradient(tokens: int) -> torch.Tensor:
        of_output, inputs = fp8(64, tokens), fp8(48, tokens)
        return torch._scaled_mm(of_output, inputs.t(), scale(), scale(), out_dtype=torch.bfloat16)

    with pytest.raises(RuntimeError, match="divisible by 16"):
        weight_gradient(31)
    assert weight_gradient(32).shape == (64, 48)


def test_an_fp8_matmul_takes_one_scale_for_each_row():
    """AMP0175."""
    product = torch._scaled_mm(
        fp8(32, 64), fp8(48, 64).t(), scale(32, 1), scale(1, 48), out_dtype=torch.bfloat16
    )
    assert product.shape == (32, 48)


def save_casts(context, op, *args, **kwargs):
    is_cast = op is torch.ops.aten._to_copy.default
    return CheckpointPolicy.MUST_SAVE if is_cast else CheckpointPolicy.PREFER_RECOMPUTE


def save_nothing(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def gradients_of_two_parts(
    cache_enabled: bool, selective: bool, inside: bool = False, policy=save_casts
) -> None:
    """Two checkpointed parts with one weight; `inside` runs the backward pass in the block."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {"context_fn": contexts} if selective else {}
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
        hidden = checkpoint(layer, x, use_reentrant=False, **options)
        loss = checkpoint(layer, hidden, use_reentrant=False, **options).float().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()


def test_selective_checkpointing_misses_a_cast_that_autocast_had_cached():
    """AMP0158."""
    with pytest.raises(RuntimeError) as error:
        gradients_of_two_parts(cache_enabled=True, selective=True)
    assert is_quoted("AMP0158", str(error.value)), str(error.value)
    gradients_of_two_parts(cache_enabled=False, selective=True)
    gradients_of_two_parts(cache_enabled=True, selective=False)
    gradients_of_two_parts(cache_enabled=True, selective=True, inside=True)
    if torch.__version__.startswith("2.11."):
        gradients_of_two_parts(cache_enabled=True, selective=True, policy=save_nothing)
    else:
        with pytest.raises(RuntimeError, match="encountered during backward"):
            gradients_of_two_parts(cache_enabled=True, selective=True, policy=save_nothing)


class TwoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).dtype

    def encode(self, x):
        return self.layer(x).dtype


def test_accelerate_puts_only_the_forward_of_the_prepared_model_under_autocast():
    """AMP0178 and AMP0294."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # another test may have made one
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared, x = accelerator.prepare(TwoMethods()), torch.ones(1, 2)
    assert accelerator.mixed_precision == "bf16"
    assert prepared(x) is torch.bfloat16
    assert prepared.encode(x) is torch.float32
    assert TwoMethods()(x) is torch.float32
    with accelerator.autocast():
        assert prepared.encode(x) is torch.bfloat16
    accelerate.state.AcceleratorState._reset_state(True)


def test_accelerate_refuses_fp16_on_the_cpu_only_in_the_words_that_are_quoted():
    """AMP0067."""
    accelerate = pytest.importorskip("accelerate.accelerator")
    source = inspect.getsource(accelerate)
    quoted = [m for m in ROWS["AMP0067"]["quoted"] if "16 mixed precision " in m]
    assert len(quoted) == 5
    assert [message for message in quoted if message not in source] == [
        "fp16 mixed precision requires a GPU"  # of old versions
    ]
    assert "fp16 mixed precision with MPS device requires a Pytorch >= 2.5.0" in source
    assert "bf16 mixed precision with MPS device requires a Pytorch >= 2.6.0" in source


def test_autocast_asked_without_a_device_answers_for_cuda_only():
    """AMP0288."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()
        assert torch.is_autocast_enabled(x.device.type)
        assert torch.get_autocast_dtype(x.device.type) is (x @ x).dtype is torch.bfloat16
    with torch.autocast("xpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("xpu")


BF16_BLOCK = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def bytes_saved(forward) -> int:
    """Bytes of the storages that a forward pass keeps for its backward pass."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_autocast_writes_out_an_expanded_tensor_unless_it_is_cast_before():
    """AMP0289."""
    base, x = torch.randn(100, 8), torch.randn(32, 8, requires_grad=True)
    dtype = torch.bfloat16

    def multiply(matrix, **options):
        with BF16_BLOCK(**options):
            return matrix.expand(32, -1, -1).bmm(x.unsqueeze(-1))

    def linear():
        with BF16_BLOCK():
            return nn.functional.linear(x, base), x @ base.T

    written = 32 * base.numel() * 2
    assert bytes_saved(lambda: multiply(base)) >= written
    assert bytes_saved(lambda: multiply(base, enabled=False)) < written / 10
    assert bytes_saved(lambda: multiply(base.to(dtype))) < written / 10
    assert bytes_saved(linear) < written / 10
    for result in linear():
        torch.testing.assert_close(multiply(base.to(dtype)).squeeze(-1), result)


def repeated(layer):
    h = torch.ones(1, 64)
    for _ in range(20):
        h = layer(h).tanh()
    return h


def nested(layer, **options):
    with BF16_BLOCK(cache_enabled=False), BF16_BLOCK(**options):
        return repeated(layer)


def test_without_its_cache_autocast_keeps_a_cast_for_each_use():
    """AMP0293."""
    layer = nn.Linear(64, 64)
    casts = layer.weight.numel() * 2

    def uses(forward) -> int:
        return round(bytes_saved(forward) / casts)

    assert uses(lambda: nested(layer)) == 19  # the first input needs no gradient
    assert uses(lambda: nested(layer, cache_enabled=True)) <= 2
    nested(layer, cache_enabled=True).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_lightning_turns_the_cache_off():
    """AMP0293 and AMP0294."""
    plugins = pytest.importorskip("lightning.pytorch.plugins.precision")
    plugin = plugins.MixedPrecision("bf16-mixed", "cpu")
    layer = nn.Linear(64, 64)
    with plugin.forward_context():
        assert layer(torch.ones(1, 64)).dtype is torch.bfloat16
        assert layer.weight.dtype is torch.float32
        assert not torch.is_autocast_cache_enabled()
        assert bytes_saved(lambda: repeated(layer)) > 10 * layer.weight.numel() * 2
        with BF16_BLOCK(cache_enabled=True):
            assert torch.is_autocast_cache_enabled()


def test_fabric_puts_only_the_model_that_setup_returns_under_autocast():
    """AMP0292 and AMP0094."""
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", precision="bf16-mixed")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    dtypes, outside = [], []
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    returned, optimizer = fabric.setup(model, optimizer)
    returned.register_forward_hook(lambda module, inputs, output: outside.append(output.dtype))
    x = torch.ones(1, 2)
    model(x)
    returned(x)
    assert dtypes == [torch.float32, torch.bfloat16]
    assert outside == [torch.float32]
    assert x.dtype is torch.float32


@pytest.mark.parametrize("keep", [True, False])
def test_unwrap_model_takes_autocast_out_of_the_prepared_model(keep):
    """AMP0299."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    dtypes = []
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    prepared = accelerator.prepare(model)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)
    x = torch.ones(1, 2)
    assert prepared(x).dtype is torch.float32  # AMP0094
    assert dtypes == [torch.bfloat16 if keep else torch.float32]
    assert unwrapped is model
    with accelerator.autocast():
        unwrapped[0](x)
    assert dtypes[-1] is torch.bfloat16
    accelerate.state.AcceleratorState._reset_state()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_a_compiled_layer_keeps_a_cast_for_each_call_and_a_compiled_loop_one():
    """AMP0293."""
    layer = nn.Linear(64, 64)
    casts = layer.weight.numel() * 2

    def in_block(run) -> int:
        def forward():
            with BF16_BLOCK():
                return run()

        return round(bytes_saved(forward) / casts)

    compiled_layer, compiled_loop = torch.compile(layer), torch.compile(repeated)
    assert in_block(lambda: repeated(layer)) <= 2
    assert in_block(lambda: repeated(compiled_layer)) >= 19
    assert in_block(lambda: compiled_loop(layer)) <= 2


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float32, 8)])
def test_the_moments_of_adamw_have_the_dtype_of_the_weights(dtype, size):
    """AMP0317."""
    weight = nn.Parameter(torch.ones(10, dtype=dtype))
    adamw = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    adamw.step()
    moments = [adamw.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
    assert sum(moment.nbytes for moment in moments) == size * weight.numel()


def test_a_second_moment_in_bf16_does_not_decay():
    """AMP0317."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    adam = torch.optim.Adam([weight], betas=(0.9, 0.999))
    for gradient in (1.0, *[0.0] * 100):
        weight.grad = torch.full_like(weight, gradient)
        adam.step()
        if gradient:
            first = adam.state[weight]["exp_avg_sq"].clone()
    assert torch.equal(adam.state[weight]["exp_avg_sq"], first)
