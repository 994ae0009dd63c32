"""Notebook 08h, and the failures of its area that have no section there."""

import functools
import io
import logging
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_processes import values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from course.failures import message_of

import write_failures
from amp_lab.failures import read_explanation
from amp_lab.failures.reference import Reference, reference_from

BF16 = torch.bfloat16
IS_2_15 = hasattr(torch._inductor.config, "numerics")
x = torch.ones(2, 2)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@functools.cache
def reference() -> Reference:
    """What is written in the notebooks now."""
    return reference_from(write_failures.reference())


def code_of(message: str) -> str:
    """The failure that a message leads to first."""
    return read_explanation(f"with autocast\n{message}", reference()).failures[0].code


# --- compiled functions ---


class TorchAutocast:
    def __init__(self):
        self.block = torch.autocast("cpu", dtype=BF16)

    def __enter__(self):
        self.block.__enter__()

    def __exit__(self, *error):
        self.block.__exit__(*error)


@contextmanager
def from_a_function():
    with torch.autocast("cpu", dtype=BF16):
        yield


def product_in(block):
    def product(x):
        with block():
            return x @ x.T

    return product


def test_a_class_around_autocast_breaks_the_graph_and_a_function_does_not():
    """AMP0180."""
    how = {"backend": "aot_eager", "fullgraph": True}
    message = message_of(lambda: torch.compile(product_in(TorchAutocast), **how)(x))
    assert code_of(f"torch._dynamo.exc.Unsupported: {message}") == "AMP0180"
    assert torch.compile(product_in(from_a_function), **how)(x).dtype is BF16
    whole = torch.compile(product_in(lambda: torch.autocast("cpu", dtype=BF16)), **how)
    assert whole(x).dtype is BF16


def test_without_fullgraph_the_class_around_autocast_is_not_compiled():
    """AMP0180."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    product = product_in(TorchAutocast)
    assert torch.compile(lambda x: product(x + 1), backend=backend)(x).dtype is BF16
    assert not any("matmul" in str(node.target) for graph in graphs for node in graph)
    graphs.clear()
    assert torch.compile(product, backend=backend)(x).dtype is BF16
    assert not graphs


def test_a_compiled_function_calls_no_method_of_the_scaler():
    """AMP0041."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu")
    calls = {
        "scale": lambda x: scaler.scale(x.sum()),
        "unscale_": lambda x: scaler.unscale_(optimizer),
        "step": lambda x: scaler.step(optimizer),
        "update": lambda x: scaler.update(),
    }
    for name, call in calls.items():
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        message = message_of(lambda compiled=compiled: compiled(x))
        assert f"the function `GradScaler.{name}` should not be traced" in message
        assert code_of(f"torch._dynamo.exc.Unsupported: {message}") == "AMP0041"


def test_a_model_and_a_loss_under_autocast_are_one_graph():
    """AMP0041 and AMP0096."""

    def loss_of(x):
        with torch.autocast("cpu", dtype=BF16):
            product = x @ x
        return product.float().sum()

    assert torch.compile(loss_of, backend="eager", fullgraph=True)(x) == 8
    assert torch._dynamo.explain(loss_of)(x).graph_break_count == 0
    broken = torch._dynamo.explain(lambda x: loss_of(x) * loss_of(x).item())(x)
    assert broken.graph_break_count == 1


def square_over(x):
    return x * x / x


def test_a_compiled_kernel_rounds_once_and_strict_numerics_as_often_as_eager_mode():
    """AMP0095."""
    large = torch.full((8,), 300.0).half()
    assert square_over(large).isinf().all()
    with warnings.catch_warnings(action="ignore"):  # of torch 2.11
        assert (torch.compile(square_over)(large) == 300).all()
        torch.compiler.reset()
        emulated = torch.compile(square_over, options={"emulate_precision_casts": True})
        if torch.__version__.startswith(("2.11.", "2.12.")):
            assert (emulated(large) == 300).all()
    if IS_2_15:
        assert emulated(large).isinf().all()
        torch.compiler.reset()
        strict = torch.compile(square_over, options={"numerics": "strict"})
        assert strict(large).isinf().all()


def test_autocast_causes_another_compilation_and_a_stance_refuses_it():
    """AMP0184."""
    compiled = torch.compile(lambda x: x @ x, backend="eager")
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"), torch.autocast("cpu", dtype=BF16):
        message = message_of(lambda: compiled(x))
    assert "GLOBAL_STATE changed: autocast" in message
    assert code_of(message) == "AMP0184"
    assert torch._dynamo.config.recompile_limit == 8


def test_another_dtype_recompiles_and_the_same_block_or_one_inside_does_not():
    """AMP0184."""
    compiled = torch.compile(lambda x: x @ x, backend="eager")
    with torch.autocast("cpu", dtype=BF16):
        compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.autocast("cpu", dtype=BF16):
            assert compiled(x).dtype is BF16
        with torch.autocast("cpu", dtype=torch.float16):
            message = message_of(lambda: compiled(x))
    assert code_of(message) == "AMP0184"
    inside = torch.compile(product_in(lambda: torch.autocast("cpu", dtype=BF16)), backend="eager")
    inside(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert inside(x).dtype is BF16


def test_at_the_limit_of_recompilations_only_further_combinations_run_in_eager_mode(caplog):
    """AMP0184."""
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(None) or graph.forward(*args)

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(lambda x: x @ x, backend=backend)
        whole = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
        for function in (compiled, whole):
            function(x)
        with torch.autocast("cpu", dtype=BF16):
            assert compiled(x).dtype is BF16
            assert len(runs) == 1
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                whole(x)
        compiled(x)
    assert len(runs) == 2
    torch.compiler.reset()


def test_traced_under_autocast_a_shared_weight_is_a_constant():
    """AMP0082."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) @ self.layer.weight

    def trace(**options):
        with warnings.catch_warnings(action="ignore"), torch.autocast("cpu", BF16, **options):
            return torch.jit.trace(Shared(), x)

    assert code_of(f"RuntimeError: {message_of(trace)}") == "AMP0082"
    assert trace(cache_enabled=False)(x).dtype is BF16


def test_the_check_of_a_trace_uses_a_weight_again_in_the_autocast_block():
    """AMP0082."""
    layer = nn.Linear(2, 2)
    with warnings.catch_warnings(action="ignore"), torch.autocast("cpu", BF16):
        message = message_of(lambda: torch.jit.trace(layer, x))
        assert code_of(f"RuntimeError: {message}") == "AMP0082"
    with warnings.catch_warnings(action="ignore"), torch.autocast("cpu", BF16):
        assert torch.jit.trace(layer, x, check_trace=False)(x).dtype is BF16


def test_recompilations_are_logged(monkeypatch, caplog):
    """AMP0096: as with the environment variable `TORCH_LOGS=recompiles`."""
    compiled = torch.compile(lambda x: x @ x, backend="eager")
    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.delenv("TORCH_LOGS", raising=False)  # it would win over `set_logs`
    torch._logging.set_logs(recompiles=True)
    try:
        compiled(x)
        assert "Recompiling" not in caplog.text
        with torch.autocast("cpu", dtype=BF16):
            compiled(x)
    finally:
        torch._logging.set_logs()
    assert "Recompiling" in caplog.text


def test_the_cache_of_autocast_ends_with_the_block():
    """AMP0079."""
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        before = x @ weight
        weight.fill_(2)
        assert torch.equal(x @ weight, before)  # the cached cast
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        assert torch.equal(x @ weight, 2 * before)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        assert torch.equal(x @ weight, 2 * before)
        weight.fill_(1)
        assert torch.equal(x @ weight, before)


# --- checkpointing ---


class Rotary(nn.Module):
    """Stores a cast of its table, so its second call computes in another dtype."""

    def __init__(self):
        super().__init__()
        self.table = torch.full((2,), 1 + 2**-9)

    def forward(self, x):
        rotated = x.bfloat16() * self.table
        self.table = self.table.bfloat16()
        return rotated.exp()


class CastsWhereUsed(Rotary):
    def forward(self, x):
        return (x.bfloat16() * self.table.bfloat16()).exp()


def gradient_of(run):
    inputs = torch.ones(2, requires_grad=True)
    run(inputs).sum().backward()
    return inputs.grad


def test_a_module_that_stores_a_cast_cannot_be_checkpointed():
    """AMP0080."""
    message = message_of(
        lambda: gradient_of(lambda x: checkpoint(Rotary(), x, use_reentrant=False))
    )
    assert code_of(f"CheckpointError: {message}") == "AMP0080"
    module = CastsWhereUsed()
    right = gradient_of(module)
    assert torch.equal(gradient_of(lambda x: checkpoint(module, x, use_reentrant=False)), right)


@pytest.mark.parametrize("names_dtype", [False, True])
def test_a_default_dtype_that_holds_only_in_the_first_run_is_not_used(names_dtype):
    """AMP0080: as in Lightning's `bf16-true`."""

    def forward(x):
        steps = torch.arange(2.0, dtype=x.dtype) if names_dtype else torch.arange(2.0)
        return (x * steps).exp()

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    plugin = pytest.importorskip("lightning.pytorch.plugins.precision").HalfPrecision("bf16-true")
    with plugin.forward_context():
        output = checkpoint(forward, x, use_reentrant=False)
    assert torch.get_default_dtype() is torch.float32
    if names_dtype:
        output.sum().backward()
        assert x.grad.isfinite().all()
    else:
        message = message_of(lambda: output.sum().backward())
        assert code_of(f"CheckpointError: {message}") == "AMP0080"


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"use_reentrant": False, "determinism_check": "none"}]
)
def test_without_its_check_a_checkpoint_gives_a_wrong_gradient(options):
    """AMP0080."""
    right = gradient_of(Rotary())
    assert not torch.equal(gradient_of(lambda x: checkpoint(Rotary(), x, **options)), right)


# --- old names ---


def test_the_old_scaler_takes_a_device_for_its_scale():
    with warnings.catch_warnings(action="ignore"):
        scaler = torch.cpu.amp.GradScaler("cpu")
    message = message_of(lambda: scaler.scale(torch.ones(1)))
    assert code_of(f"TypeError: {message}") == "AMP0035"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_new_names_take_a_device_and_do_not_warn(device):
    """AMP0035."""
    with warnings.catch_warnings(action="error"):
        torch.autocast(device, dtype=BF16, enabled=False)
        torch.amp.GradScaler(device, enabled=False)
        torch.amp.custom_fwd(nn.Identity.forward, device_type=device)
        torch.amp.custom_bwd(nn.Identity.forward, device_type=device)


# --- TF32 ---


def test_two_old_tf32_switches_can_contradict_each_other():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_tf32 = False
        message = message_of(torch.get_float32_matmul_precision)
    finally:
        torch.set_float32_matmul_precision(before)
    assert code_of(f"RuntimeError: {message}") == "AMP0037"
    assert torch.get_float32_matmul_precision() == before


def test_the_old_switch_of_convolutions_changes_both_names():
    """AMP0037."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        with warnings.catch_warnings(action="ignore"):  # may say: use the new API settings
            for is_tf32 in (not before, before):
                cudnn.allow_tf32 = is_tf32
                assert cudnn.allow_tf32 is is_tf32
                assert (cudnn.conv.fp32_precision == "tf32") is is_tf32
    finally:
        cudnn.allow_tf32 = before


# --- several processes ---


class Branch(nn.Sequential):
    def forward(self, x, both):
        return self[1](self[0](x)) if both else self[0](x)


def train_with_ddp(*steps, freezes=False, **options):
    """One step for each of `steps`, which say whether the step uses both layers."""
    layers = Branch(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].requires_grad_(not freezes)
    model = DistributedDataParallel(layers, **options)
    for both in steps:
        model(x, both).sum().backward()


def test_ddp_wants_the_same_gradients_in_each_step(group_of_one):
    """AMP0040."""
    for steps, options in (
        ((False, False), {}),
        ((False, True), {"static_graph": True}),
        ((True, False, True), {"static_graph": True}),
    ):
        message = message_of(lambda steps=steps, how=options: train_with_ddp(*steps, **how))
        assert code_of(f"RuntimeError: {message}") == "AMP0040"
    train_with_ddp(False, True, False, freezes=True)
    train_with_ddp(False, True, False, find_unused_parameters=True)


def two_dtypes(freezes=False):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    model[1].requires_grad_(not freezes)
    return model


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated, and does not shard with one rank
def test_fsdp1_wants_one_dtype_of_frozen_weights_too(group_of_one):
    """AMP0181."""
    message = message_of(lambda: fsdp1(two_dtypes(freezes=True), use_orig_params=True))
    assert code_of(f"ValueError: {message}") == "AMP0181"
    how = {"use_orig_params": True, "mixed_precision": MixedPrecision(param_dtype=BF16)}
    assert fsdp1(two_dtypes(freezes=True).float(), **how)(x).dtype is BF16
    inner = fsdp1(nn.Linear(2, 2).bfloat16(), **how)  # a unit of its own
    assert fsdp1(nn.Sequential(nn.Linear(2, 2), inner), **how)(x).dtype is BF16


def test_fsdp_casts_fp32_weights_for_the_computation(group_of_one):
    """AMP0181."""
    message = message_of(lambda: shard(two_dtypes(), param_dtype=BF16)(x))
    assert code_of(f"AssertionError: {message}") == "AMP0181"
    for model in (two_dtypes().float(), two_dtypes().to(BF16)):
        assert shard(model, param_dtype=BF16)(x).dtype is BF16


def test_scales_differ_if_one_rank_loads_the_state_and_are_the_same_if_all_do():
    """AMP0182."""
    state = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    ranks = [torch.amp.GradScaler("cpu") for _ in range(2)]
    ranks[0].load_state_dict(state)
    assert ranks[0].get_scale() != ranks[1].get_scale()
    ranks[1].load_state_dict(state)
    assert ranks[0].get_scale() == ranks[1].get_scale()


def test_the_sum_of_fp16_gradients_overflows_unless_they_are_divided_before():
    """AMP0091."""
    gradients = torch.full((8,), 20_000.0)  # of eight ranks
    assert gradients.half().isfinite().all()
    assert gradients.half().sum().isinf()
    assert (gradients.half() / 8).sum() == 20_000
    assert gradients.bfloat16().sum().isfinite()
    assert gradients.sum() == 160_000


def test_a_gradient_of_another_dtype_cannot_be_assigned():
    weight = nn.Parameter(torch.ones(2))
    message = message_of(lambda: setattr(weight, "grad", torch.ones(2).bfloat16()))
    assert code_of(f"RuntimeError: {message}") == "AMP0159"
    weight.grad = torch.ones(2).bfloat16().to(weight.dtype)


def test_sync_batch_norm_is_refused_on_a_cpu(group_of_one):
    """AMP0191."""
    norms = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(norms)
    for refused in (lambda: DistributedDataParallel(model), lambda: model(x)):
        assert code_of(f"ValueError: {message_of(refused)}") == "AMP0191"
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert DistributedDataParallel(plain)(x).shape == x.shape


def test_a_collective_wants_one_dtype(group_of_one):
    """AMP0190."""
    low = torch.ones(2).bfloat16()
    for refused in (
        lambda: dist.all_gather([torch.ones(2)], low),
        lambda: dist.all_gather_into_tensor(torch.ones(2), low),
    ):
        assert code_of(f"RuntimeError: {message_of(refused)}") == "AMP0190"
    outputs = [torch.zeros(2)]
    dist.all_gather(outputs, low.float())
    assert torch.equal(outputs[0], low.float())


def test_gloo_sends_bf16_and_of_fp8_only_the_bytes(group_of_one):
    """AMP0321."""
    low = torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn)
    for refused in (lambda: dist.all_reduce(low), lambda: dist.broadcast(low, src=0)):
        assert code_of(f"RuntimeError: {message_of(refused)}") == "AMP0321"
    dist.broadcast(low.view(torch.uint8), src=0)
    for dtype in (torch.bfloat16, torch.float32):
        total = low.to(dtype)
        dist.all_reduce(total)
        assert torch.equal(total.float(), low.float())


def shard(model, **policy):
    mesh = init_device_mesh("cpu", (1,))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


class TakesAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, given):
        return self.layer(given["x"] if isinstance(given, dict) else given.x)


def test_fsdp2_casts_tensors_in_a_dict_but_not_in_another_object(group_of_one):
    """AMP0193."""
    model = shard(TakesAnObject(), param_dtype=BF16)
    assert model({"x": x}).dtype is BF16
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(SimpleNamespace(x=x))
    model.layer.register_forward_pre_hook(lambda layer, args: args[0].to(layer.weight.dtype))
    assert model(SimpleNamespace(x=x)).dtype is BF16


@dataclass
class Batch:
    x: torch.Tensor


def test_fsdp2_casts_tensors_in_a_dataclass(group_of_one):
    """AMP0193: torch 2.11 and later."""
    assert shard(TakesAnObject(), param_dtype=BF16)(Batch(x)).dtype is BF16


def test_fsdp2_casts_no_buffer_and_keeps_the_dtype_of_the_weights(group_of_one):
    """AMP0193."""
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.ones(2))
    shard(model, param_dtype=BF16)
    assert model(x).dtype is BF16
    assert model.table.dtype is torch.float32
    with pytest.raises(RuntimeError, match="same dtype"):
        model(x) @ torch.diag(model.table)
    assert (model(x) @ torch.diag(model.table.to(BF16))).dtype is BF16


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_fsdp2_updates_the_weights_in_their_dtype(group_of_one, dtype):
    """AMP0194."""
    model = nn.Linear(2, 2, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    shard(model.float() if dtype is torch.float32 else model, param_dtype=BF16)
    output = model(x)
    output.sum().backward()
    assert output.dtype is BF16
    assert model.weight.dtype is model.weight.grad.dtype is dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-11)
    optimizer.step()
    is_lost = (model.weight.full_tensor() == 1).all().item()
    assert is_lost is (dtype is BF16)


def sums_of_two_dtypes() -> str:
    """What a rank says of a sum in which one rank has another dtype."""
    # Set here and not by the parent: the server that forks the ranks would keep it for all tests.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    dtype = BF16 if dist.get_rank() else torch.float32
    message = message_of(lambda: dist.all_reduce(torch.ones(2, dtype=dtype)))
    dist.destroy_process_group()
    return message


def exchange_of_two_dtypes() -> list[float]:
    """What a rank receives in an all-to-all if one rank sends 1 in bf16, and the other in fp16."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    dtype = BF16 if dist.get_rank() else torch.float16
    received = torch.zeros(2, dtype=dtype)
    dist.all_to_all_single(received, torch.ones(2, dtype=dtype))
    dist.destroy_process_group()
    return received.tolist()


@pytest.mark.slow
def test_a_debugging_variable_compares_the_dtypes_of_the_ranks():
    """AMP0190."""
    for message in values_of(sums_of_two_dtypes, 2):
        assert "Detected mismatch between collectives on ranks" in message
        assert "TensorDtypes=BFloat16" in message
    for received in values_of(exchange_of_two_dtypes, 2):
        assert received != [1, 1]  # and nobody told


def gradients_if_a_rank_leaves_out_a_batch() -> list[float]:
    """The gradient of each step; rank 0 leaves out the step of its second batch."""
    dist.init_process_group("gloo")
    rank, gradients = dist.get_rank(), []
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    for batch in range(3 - rank):  # so that no rank waits at the end
        loss = model(torch.full((1, 1), 10.0 * rank + batch)).sum()
        if (rank, batch) == (0, 1):
            continue
        model.zero_grad()
        loss.backward()
        gradients.append(model.module.weight.grad.item())
    dist.destroy_process_group()
    return gradients


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_batch_joins_another_batch():
    """AMP0189."""
    first, mixed = (0 + 10) / 2, (2 + 11) / 2
    assert values_of(gradients_if_a_rank_leaves_out_a_batch, 2) == [[first, mixed]] * 2


def fsdp1(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated, and does not shard with one rank
@pytest.mark.parametrize("how", ["FSDP1", "FSDP1 and autocast", "FSDP2"])
def test_a_compiled_sharded_model_has_fp32_gradients(group_of_one, how):
    """AMP0314."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if how == "FSDP2":
        shard(model, param_dtype=BF16)
    elif how == "FSDP1":
        model = fsdp1(model, mixed_precision=MixedPrecision(param_dtype=BF16))
    else:
        model = fsdp1(model)
    with torch.autocast("cpu", dtype=BF16, enabled="autocast" in how):
        output = torch.compile(model, backend="aot_eager")(x)
    output.sum().backward()
    assert output.dtype is BF16
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


def test_a_gradient_of_another_dtype_is_refused_unless_it_is_cast():
    """AMP0314."""
    weight, gradient = nn.Parameter(torch.ones(1)), torch.ones(1).bfloat16()
    message = message_of(lambda: setattr(weight, "grad", gradient))
    assert "attempting to assign a gradient with dtype 'c10::BFloat16'" in message
    weight.grad = gradient.to(weight.dtype)


def test_another_order_of_additions_is_as_near_to_fp32():
    """AMP0209."""
    torch.manual_seed(0)
    left, right = (torch.randn(64, 64).bfloat16() for _ in range(2))
    at_once = left @ right
    halves = left[:, :32] @ right[:32] + left[:, 32:] @ right[32:]
    assert not torch.equal(at_once, halves)
    in_fp32 = left.float() @ right.float()
    for result in (at_once, halves):
        assert (result - in_fp32).norm() < 2**-8 * in_fp32.norm()


def test_fsdp2_accumulates_in_two_dtypes_in_torch_2_11(group_of_one):
    """AMP0192."""
    model = Branch(nn.Linear(2, 2), nn.Linear(2, 2))
    shard(model, param_dtype=BF16, reduce_dtype=torch.float32)

    def accumulate(model):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(x, both=is_last).sum().backward()

    if IS_2_15:
        accumulate(model)
    if torch.__version__.startswith("2.11."):
        message = message_of(lambda: accumulate(model))
        assert code_of(f"AssertionError: {message}") == "AMP0192"
    one_dtype = Branch(nn.Linear(2, 2), nn.Linear(2, 2))
    accumulate(shard(one_dtype, param_dtype=BF16, reduce_dtype=BF16))


# --- export ---


def session_of(model, example, *, newer, dtype=None, **options):
    """A session of ONNX Runtime, exported in an autocast block if a dtype is given."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    pytest.importorskip("onnxscript", reason="pip install onnxruntime onnxscript")
    file = io.BytesIO()
    block = torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None)
    with warnings.catch_warnings(action="ignore"), block:
        torch.onnx.export(model.eval(), (example,), file, dynamo=newer, **options)
    return onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("newer", [False, True])
def test_onnx_runtime_refuses_a_norm_that_was_exported_under_autocast(newer):
    def norm():
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    example = torch.randn(2, 4)
    message = message_of(lambda: session_of(norm(), example, newer=newer, dtype=torch.float16))
    assert code_of(message) == "AMP0062"
    session_of(norm().half(), example.half(), newer=newer)


def add_with_a_constant(constant="FLOAT16", output="FLOAT16"):
    """A model of ONNX that adds a constant of this dtype to an input in fp16."""
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    types, helper = onnx.TensorProto, onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", types.FLOAT16, [1])],
        [helper.make_tensor_value_info("y", getattr(types, output), [1])],
        [helper.make_tensor("one", getattr(types, constant), [1], [1.0])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def load(model):
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    content = model.SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("wrong", ["constant", "output"])
def test_onnx_runtime_casts_no_constant_and_no_output(wrong):
    """AMP0062."""
    refused = add_with_a_constant(**{wrong: "FLOAT"})
    assert code_of(message_of(lambda: load(refused))) == "AMP0062"
    load(add_with_a_constant())


def test_the_converter_of_onnx_runtime_casts_around_a_blocked_operator():
    """AMP0062."""
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(nn.LayerNorm(4), (torch.randn(2, 4),), file, dynamo=False)
    for blocked in ([], ["LayerNormalization"]):
        model = onnx.load_from_string(file.getvalue())
        converted = float16.convert_float_to_float16(model, op_block_list=blocked)
        names = [node.op_type for node in converted.graph.node]
        assert ("Cast" in names) is bool(blocked)
        assert load(converted).get_inputs()[0].type == "tensor(float16)"


@pytest.mark.parametrize("newer", [False, True])
def test_onnx_runtime_refuses_bf16_and_another_input_dtype(newer):
    example = torch.randn(2, 4)
    refused = message_of(
        lambda: session_of(nn.Linear(4, 4).bfloat16(), example.bfloat16(), newer=newer)
    )
    assert code_of(refused) == "AMP0196"
    session = session_of(nn.Linear(4, 4).half(), example.half(), newer=newer)
    name = session.get_inputs()[0].name
    assert code_of(message_of(lambda: session.run(None, {name: example.numpy()}))) == "AMP0075"
    session.run(None, {name: example.half().numpy()})


@pytest.mark.parametrize(("opset", "is_refused"), [(14, True), (15, False)])
def test_a_batch_norm_takes_fp32_weights_from_opset_15_on(opset, is_refused):
    """AMP0083."""
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    how = {"newer": False, "dtype": torch.float16, "opset_version": opset}
    if is_refused:
        message = message_of(lambda: session_of(model, torch.randn(1, 2, 4), **how))
        assert "BatchNormalization" in message
    else:
        session_of(model, torch.randn(1, 2, 4), **how)


def older_file(model, example, opset, *, is_mixed=False):
    """A file of the older exporter, exported inside an autocast block or not."""
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    file = io.BytesIO()
    block = torch.autocast("cpu", torch.float16, enabled=is_mixed)
    with warnings.catch_warnings(action="ignore"), block:
        torch.onnx.export(model.eval(), (example,), file, dynamo=False, opset_version=opset)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize(("opset", "norm"), [(14, nn.BatchNorm1d), (17, nn.LayerNorm)])
def test_the_checker_refuses_a_norm_that_was_exported_under_autocast(opset, norm):
    """AMP0083."""
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    model, example = nn.Sequential(nn.Conv1d(4, 4, 1), norm(4)), torch.randn(1, 4, 4)
    mixed = older_file(model, example, opset, is_mixed=True)
    message = message_of(lambda: onnx.checker.check_model(mixed, full_check=True))
    assert code_of(message) == "AMP0083"
    cast = older_file(model.half(), example.half(), opset)
    onnx.checker.check_model(cast, full_check=True)


def test_a_layer_norm_is_one_operator_from_opset_17_on():
    """AMP0076."""
    for opset in (16, 17):
        graph = older_file(nn.LayerNorm(4), torch.randn(2, 4), opset).graph
        ops = [node.op_type for node in graph.node]
        assert (ops == ["LayerNormalization"]) == (opset == 17)
        assert ("Pow" in ops) == (opset == 16)
    squares = torch.tensor([255.875, 256.0]).half().square()
    assert squares.isinf().tolist() == [False, True]


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, x):
        return x + self.p


class Scaled(nn.Module):
    def __init__(self, casts):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.casts = casts

    def forward(self, x):
        return x * (self.p.to(x.dtype) if self.casts else self.p)


def test_the_older_exporter_multiplies_bf16_by_a_scalar_wrongly():
    """AMP0084."""
    how = {"newer": False, "dtype": BF16}
    for model in (Scaled(False), Added()):
        message = message_of(partial(session_of, model, x.bfloat16(), **how))
        assert code_of(f"RuntimeError: {message}") == "AMP0084"
    with warnings.catch_warnings(action="ignore"), torch.autocast("cpu", dtype=BF16):
        for model, newer in ((Scaled(True), False), (Scaled(False), True)):
            torch.onnx.export(model, (x.bfloat16(),), io.BytesIO(), dynamo=newer)


class CastsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2).half()

    def forward(self, x):
        return self.layer(x.half()).float()


def test_a_module_that_casts_inside_takes_fp32_in_onnx_runtime():
    """AMP0075."""
    session = session_of(CastsInside(), x, newer=True)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert output.dtype == "float32"


def test_onnx_runtime_runs_an_fp16_model_in_fp32_on_a_cpu(tmp_path):
    """AMP0231."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    file, options = io.BytesIO(), onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(nn.Linear(2, 2).half(), (x.half(),), file, dynamo=False)
    onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert ops[0] == "Cast"
    assert ops[-2:] == ["Gemm", "Cast"]
