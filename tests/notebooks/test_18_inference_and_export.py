"""Notebook 18: what its text says of torch without a cell that shows it."""

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

BF16 = torch.bfloat16
CASTS_ITSELF = "wrap_with_autocast"  # the op that an exported autocast block becomes


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
        self.count += is_cast and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


class CastsItself(nn.Linear):
    """A layer with autocast inside."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=BF16):
            return super().forward(x)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("mode", "casts"), [(torch.enable_grad, 1), (torch.no_grad, 1), (torch.inference_mode, 4)]
)
def test_eager_autocast_casts_a_weight_once_but_in_inference_mode(mode, casts):
    layer, x = nn.Linear(8, 8, bias=False), torch.zeros(2, 8)
    with mode(), torch.autocast("cpu", dtype=BF16), Casts(layer.weight.shape) as found:
        for _ in range(4):
            layer(x)
    assert found.count == casts


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("compiled", "copies"), [("nothing", 1), ("layer", 4), ("loop", 1)])
def test_a_compiled_layer_casts_its_weight_in_each_call_and_a_compiled_loop_once(compiled, copies):
    """With gradients recorded the copies are kept, so they can be counted."""
    layer, x = nn.Linear(16, 16), torch.randn(2, 16, requires_grad=True)
    called = torch.compile(layer, backend="aot_eager") if compiled == "layer" else layer
    kept = {}

    def note(tensor):
        if tensor.dtype is BF16 and tensor.shape == layer.weight.shape:
            kept[tensor.untyped_storage()._cdata] = tensor  # alive, so no address comes twice
        return tensor

    def loop(x):
        for _ in range(4):
            x = called(x)
        return x

    run = torch.compile(loop, backend="aot_eager") if compiled == "loop" else loop
    with torch.autocast("cpu", dtype=BF16):
        run(x)  # compiles it
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=BF16):
        run(x)
    assert len(kept) == copies


def test_many_similarities_near_1_are_equal_in_bf16_and_none_in_fp32():
    torch.manual_seed(0)
    features = nn.functional.normalize(1 + 0.2 * torch.randn(300, 64)).to(BF16)
    ties = {}
    for dtype in (BF16, torch.float32):
        similar = features.to(dtype) @ features.to(dtype).T
        best = similar.fill_diagonal_(-1).topk(2).values
        assert best.min() > 0.9
        ties[dtype] = (best[:, 0] == best[:, 1]).float().mean()
    assert ties[BF16] > 0.5
    assert ties[torch.float32] < 0.01


def test_a_batch_norm_is_folded_in_fp32_before_the_cast():
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(4, 8, 3, bias=False).eval(), nn.BatchNorm2d(8).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    images = torch.randn(16, 4, 9, 9)
    cast = copy.deepcopy(convolution).to(BF16), copy.deepcopy(norm).to(BF16)
    with torch.no_grad():
        exact = norm(convolution(images))
        folded = fuse_conv_bn_eval(convolution, norm)
        torch.testing.assert_close(folded(images), exact)
        late = folded.to(BF16)(images.to(BF16))
        early = fuse_conv_bn_eval(*cast)(images.to(BF16))
    assert (late - exact).norm() < (early - exact).norm()


def test_sizes_that_were_called_are_not_compiled_again_and_another_state_can_be_refused():
    compiled = torch.compile(nn.Conv2d(1, 4, 3), backend="eager")
    sizes = (4, 5, 1, 300)  # a convolution on a CPU is compiled again for large batches
    with torch.no_grad():
        for size in sizes:
            compiled(torch.zeros(size, 1, 8, 8))
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in reversed(sizes):
                compiled(torch.zeros(size, 1, 8, 8))
            with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="recompile"):
                compiled(torch.zeros(5, 1, 8, 8))


def test_an_exported_program_takes_any_batch():
    layer = nn.Linear(8, 8)
    any_batch = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(layer, (torch.zeros(2, 8),), dynamic_shapes=any_batch)
    for batch in (1, 2, 5):
        assert program.module()(torch.zeros(batch, 8)).shape == (batch, 8)


def test_a_program_exported_with_one_image_takes_only_one():
    layer = nn.Linear(8, 8)
    any_batch = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(layer, (torch.zeros(1, 8),), dynamic_shapes=any_batch)
    assert program.module()(torch.zeros(1, 8)).shape == (1, 8)
    with pytest.raises((AssertionError, RuntimeError)):
        program.module()(torch.zeros(2, 8))


def test_autocast_inside_a_model_is_exported_as_a_region_that_becomes_casts():
    """AMP0099."""
    program = torch.export.export(CastsItself(8, 8), (torch.zeros(2, 8),))
    assert CASTS_ITSELF in str(program.graph)
    assert {weight.dtype for weight in program.state_dict.values()} == {torch.float32}
    plain = program.run_decompositions()
    assert CASTS_ITSELF not in str(plain.graph)
    assert "_to_copy" in str(plain.graph)
    assert plain.module()(torch.zeros(2, 8)).dtype is BF16


@pytest.mark.slow
def test_onnx_runtime_refuses_what_was_exported_inside_autocast():
    """AMP0062."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with torch.autocast("cpu", dtype=BF16):
        program = torch.onnx.export(nn.Linear(8, 8).eval(), (torch.zeros(2, 8),), verbose=False)
    content = program.model_proto.SerializeToString()
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented):
        onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_emulated_roundings_are_those_of_eager_for_a_product_and_a_sum():
    x, y, z = torch.randn(3, 4096).bfloat16()

    def scaled_sum(x, y, z):
        return x * y + z

    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert torch.equal(torch.compile(scaled_sum)(x, y, z), scaled_sum(x, y, z))


@pytest.mark.slow
def test_emulated_roundings_leave_a_scaled_softmax_unlike_eager():
    torch.manual_seed(0)
    x = torch.randn(64, 256).bfloat16()

    def attention_weights(x):
        return (x * 1.5).softmax(-1)

    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert not torch.equal(torch.compile(attention_weights)(x), attention_weights(x))


# FP8 with torchao's quantize_


@pytest.fixture
def quantization():
    return pytest.importorskip("torchao.quantization")


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).bfloat16().eval()


def stored_dtypes(layer: nn.Linear) -> set[torch.dtype]:
    """The dtypes of the tensors that hold the weight of a layer."""
    weight: Any = layer.weight
    if type(weight.data) is torch.Tensor:
        return {weight.dtype}
    names, _ = weight.__tensor_flatten__()
    return {getattr(weight, name).dtype for name in names}


@pytest.mark.filterwarnings("ignore")  # of torchao's own
@pytest.mark.parametrize(
    ("config", "dtype"),
    [("Float8WeightOnlyConfig", torch.float8_e4m3fn), ("Int8WeightOnlyConfig", torch.int8)],
)
def test_weights_alone_are_stored_in_8_bits_and_any_machine_runs_them(
    quantization, model, config, dtype
):
    few = copy.deepcopy(model)
    quantization.quantize_(few, getattr(quantization, config)())
    assert dtype in stored_dtypes(few[0]) & stored_dtypes(few[2])
    x = torch.randn(4, 32).bfloat16()
    with torch.inference_mode():
        expected, found = model(x).float(), few(x).float()
    off = (found - expected).norm() / expected.norm()
    assert 0 < off < 2 * 2**-4  # two layers, whose weights have 4 significant bits


@pytest.mark.filterwarnings("ignore")
def test_activations_in_fp8_need_a_gpu_that_multiplies_it(quantization, model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    config = quantization.Float8DynamicActivationFloat8WeightConfig()
    with pytest.raises(AssertionError, match="requires CUDA compute capability"):
        quantization.quantize_(model, config)


@pytest.mark.filterwarnings("ignore")
def test_layers_whose_sizes_are_no_multiples_of_16_stay_as_they_are(
    quantization, model, monkeypatch
):
    from torchao.quantization import quant_api

    # The layer of 10 outputs is passed over before a kernel is asked for.
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    quantization.quantize_(model, quantization.Float8DynamicActivationFloat8WeightConfig())
    assert torch.float8_e4m3fn in stored_dtypes(model[0])
    assert stored_dtypes(model[2]) == {torch.bfloat16}


class Positions(nn.Module):
    """Adds the position of each row, made in the dtype of the input."""

    def forward(self, x):
        return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("newer", [True, False])
def test_onnx_runtime_refuses_an_fp16_arange_of_the_older_exporter(newer):
    """AMP0063."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    pytest.importorskip("onnxscript", reason="pip install onnxruntime onnxscript")
    images, file = torch.zeros(3, 2, dtype=torch.float16), io.BytesIO()
    if newer:
        how = {"dynamic_shapes": ({0: torch.export.Dim("rows")},), "verbose": False}
    else:
        how = {"dynamic_axes": {"x": {0: "rows"}}, "input_names": ["x"]}
    torch.onnx.export(Positions(), (images,), file, dynamo=newer, **how)
    onnx = pytest.importorskip("onnx", reason="pip install onnxruntime onnxscript")
    ops = [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]
    assert (ops[ops.index("Range") + 1] == "Cast") == newer
    refused = onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph
    expected = nullcontext() if newer else pytest.raises(refused, match="Range")
    with expected:
        onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


class CastPositions(Positions):
    def forward(self, x):
        integers = torch.arange(x.shape[0])[:, None]
        in_fp32 = torch.arange(x.shape[0], dtype=torch.float32)[:, None]
        return x + integers.to(x.dtype) + in_fp32.to(x.dtype)


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_takes_positions_that_are_cast():
    """AMP0063."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    images, file = torch.zeros(3, 2, dtype=torch.float16), io.BytesIO()
    how = {"dynamic_axes": {"x": {0: "rows"}}, "input_names": ["x"]}
    torch.onnx.export(CastPositions(), (images,), file, dynamo=False, **how)
    onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


class MaskedAttention(nn.Module):
    """Attention with a boolean mask, then a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        seen = torch.ones(3, 3, dtype=torch.bool)
        return self.norm(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("newer", [True, False])
def test_the_older_exporter_leaves_fp32_before_a_norm_behind_masked_attention(newer):
    """The table of messages in notebook 08: ONNX Runtime refuses it beside fp16 weights."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
    pytest.importorskip("onnxscript", reason="pip install onnxruntime onnxscript")
    tokens, file = torch.zeros(1, 1, 3, 4, dtype=torch.float16), io.BytesIO()
    how = {"verbose": False} if newer else {"opset_version": 17}  # the first that has the op
    torch.onnx.export(MaskedAttention().half(), (tokens,), file, dynamo=newer, **how)
    refused = onnxruntime.capi.onnxruntime_pybind11_state.Fail
    message = r"Type parameter \(T\) of Optype \(LayerNormalization\) bound to different types"
    expected = nullcontext() if newer else pytest.raises(refused, match=message)
    with expected:
        onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


class Scaled(nn.Module):
    """Multiplies by a number in fp32, in the dtype of the input if asked to."""

    def __init__(self, casts):
        super().__init__()
        self.p, self.casts = nn.Parameter(torch.tensor(1.0)), casts

    def forward(self, x):
        return x * (self.p.to(x.dtype) if self.casts else self.p)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("casts", "newer"), [(False, False), (True, False), (False, True)])
def test_the_older_exporter_multiplies_bf16_by_a_number_in_fp32_wrongly(casts, newer):
    """The table of other packages in notebook 08."""
    pytest.importorskip("onnxscript", reason="pip install onnxruntime onnxscript")
    how = {"verbose": False} if newer else {}
    refused = pytest.raises(RuntimeError, match="ScalarType ComplexDouble")
    with nullcontext() if casts or newer else refused:
        torch.onnx.export(
            Scaled(casts), (torch.ones(2, 2).to(BF16),), io.BytesIO(), dynamo=newer, **how
        )
