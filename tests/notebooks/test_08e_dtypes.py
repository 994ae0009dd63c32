"""Notebook 08e, and the rows of its area: what no cell of the notebook asserts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from course.failures import cuda_rules

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("weights", "inputs", "said"),
    [
        (FP32, FP16, "Half and Float"),
        (FP16, FP32, "Float and Half"),
        (FP32, BF16, "BFloat16 and Float"),
        (FP32, torch.float64, "Double and Float"),
        (FP32, torch.int64, "Long and Float"),
        (FP32, torch.uint8, "Byte and Float"),
    ],
)
def test_a_message_has_the_dtypes_in_the_order_of_the_program(weights, inputs, said):
    with pytest.raises(RuntimeError, match=f"mat1 and mat2 .* but got {said}"):
        nn.Linear(2, 2, dtype=weights)(torch.ones(1, 2, dtype=inputs))


BESIDE: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "class weights": (
        lambda x, weight: F.cross_entropy(x, torch.tensor([0]), weight=weight),
        torch.ones(2),
    ),
    "sampling grid": (
        lambda x, grid: F.grid_sample(x[None, None], grid, align_corners=False),
        torch.zeros(1, 1, 1, 2),
    ),
    "initial state": (
        lambda x, state: nn.GRU(2, 2).half()(x[None], state)[0],
        torch.zeros(1, 1, 2),
    ),
    "weights of a bag": (
        lambda x, weights: F.embedding_bag(
            torch.tensor([[0]]), x, mode="sum", per_sample_weights=weights
        ),
        torch.ones(1, 1),
    ),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_tensor_beside_the_weights_that_stayed_in_fp32_is_refused_until_it_is_cast(beside):
    """AMP0060."""
    call, wide = BESIDE[beside]
    x = torch.ones(1, 2).half()
    said = (
        "expected scalar type Half but found Float|must have the same dtype|have the same type as"
    )
    with pytest.raises(RuntimeError, match=said):
        call(x, wide)
    assert call(x, wide.to(x.dtype)).dtype is FP16


def test_a_tensor_in_fp32_raises_the_dtype_if_it_has_dimensions():
    """AMP0060."""
    low, wide = torch.ones(2).half(), torch.ones(2)
    results = [low + wide, torch.cat([low, wide]), torch.where(low > 0, low, wide)]
    assert {result.dtype for result in results} == {FP32}
    assert (low + wide[0]).dtype is torch.where(low > 0, low, wide[0]).dtype is FP16


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, lambda size: nn.GroupNorm(2, size)])
def test_autocast_does_not_help_a_norm_in_16_bits_on_a_cpu(norm, dtype):
    said = "expect parameter to have scalar type of Float"
    with torch.autocast("cpu", dtype=dtype), pytest.raises(RuntimeError, match=said):
        norm(4).to(dtype)(torch.ones(2, 4))


class Table(nn.Module):
    """Adds a table, which it makes longer for an input that is longer than any before."""

    def __init__(self, keeps_dtype: bool):
        super().__init__()
        self.keeps_dtype = keeps_dtype
        self.register_buffer("table", torch.zeros(2, 2))

    def forward(self, x):  # (T, 2)
        if len(x) > len(self.table):
            longer = torch.zeros(len(x), 2)
            self.table = longer.to(self.table) if self.keeps_dtype else longer
        return x + self.table[: len(x)]


@pytest.mark.parametrize(("keeps_dtype", "dtype"), [(False, FP32), (True, FP16)])
def test_a_table_that_is_made_longer_keeps_its_dtype_only_if_it_is_cast(keeps_dtype, dtype):
    """AMP0060."""
    table, short = Table(keeps_dtype).half(), torch.ones(1, 2).half()
    assert table(short).dtype is FP16
    assert table(short.expand(3, 2)).dtype is dtype
    assert table(short).dtype is dtype  # the short one again


@pytest.mark.filterwarnings("ignore")  # the old quantization of torch says that it is old
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fake_quantization_that_is_fused_takes_fp32_alone_and_the_other_one_runs(dtype):
    """AMP0157."""
    from torch.ao.quantization import disable_observer, get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    x = torch.randn(2, 4)

    def prepared(**version):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        return prepare_qat_fx(model, get_default_qat_qconfig_mapping("fbgemm", **version), (x,))

    with torch.autocast("cpu", dtype=dtype):
        with pytest.raises(RuntimeError, match="expected scalar type Float but found"):
            prepared()(x)
        output = prepared(version=0)(x)
    output.float().sum().backward()
    assert output.dtype is dtype
    without_autocast = prepared()
    assert without_autocast(x).dtype is FP32
    without_autocast.apply(disable_observer)
    with torch.autocast("cpu", dtype=dtype):
        assert without_autocast(x).dtype is dtype
    with pytest.raises(RuntimeError, match="Quantize only works on Float Tensor"):
        torch.quantize_per_tensor(output, 0.1, 0, torch.quint8)


@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"])
def test_no_autocast_has_the_ops_that_write_out_of_place(key):
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {op.partition(".")[0] for op in listed}  # without the overload
    assert not names & {"aten::masked_scatter", "aten::scatter", "aten::index_add"}


OUT_OF_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_scatter": lambda buffer, index, values: buffer.masked_scatter(
        (torch.arange(4) == index)[:, None], values
    ),
    "scatter": lambda buffer, index, values: buffer.scatter(0, index[None].expand(1, 2), values),
    "scatter_add_": lambda buffer, index, values: buffer.scatter_add_(
        0, index[None].expand(1, 2), values
    ),
    "index_add": lambda buffer, index, values: buffer.index_add(0, index, values),
}


@pytest.mark.parametrize("write", OUT_OF_PLACE)
def test_an_op_that_returns_a_new_tensor_can_refuse_two_dtypes_too(write):
    """AMP0019."""
    buffer, index = torch.zeros(4, 2), torch.tensor([2])
    with torch.autocast("cpu", dtype=BF16):
        values = torch.ones(1, 2) @ torch.ones(2, 2)
        said = r"expected self and source to have same dtypes|scatter\(\): Expected self|index_add"
        with pytest.raises(RuntimeError, match=said):
            OUT_OF_PLACE[write](buffer, index, values)
        assert OUT_OF_PLACE[write](buffer, index, values.to(buffer.dtype)).dtype is FP32


def test_an_op_with_a_rule_of_its_own_gets_the_dtype_of_the_rule():
    """AMP0078: without a rule, autocast does not cast the inputs."""
    dtypes = []

    @torch.library.custom_op("notebook08e::doubled", mutates_args=())
    def doubled(value: torch.Tensor) -> torch.Tensor:
        dtypes.append(value.dtype)
        return 2 * value

    with torch.autocast("cpu", dtype=BF16):
        doubled(torch.ones(1).bfloat16())
    torch.library.register_autocast("notebook08e::doubled", "cpu", FP32)
    with torch.autocast("cpu", dtype=BF16):
        doubled(torch.ones(1).bfloat16())
    assert dtypes == [BF16, FP32]


@pytest.mark.parametrize(("block", "other"), [(BF16, FP16), (FP16, BF16)])
def test_an_op_of_the_widest_dtype_refuses_the_other_16_bits_unless_fp32_comes_first(block, other):
    wide, low, double = torch.ones(2), torch.ones(2, dtype=other), torch.ones(2).double()
    with torch.autocast("cpu", dtype=block):
        assert torch.cat([wide, low]).dtype is FP32
        assert torch.cat([wide, wide.to(block)]).dtype is FP32
        assert torch.cat([double, double]).dtype is torch.float64
        assert torch.cat([wide.long(), wide.long()]).dtype is torch.int64
        for tensors in ([low, low], [low, wide], [wide.to(block), low]):
            with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
                torch.cat(tensors)


def test_addcmul_on_cuda_refuses_the_other_16_bits():
    with cuda_rules(FP16):
        tensor = torch.rand(2, device="cuda").bfloat16()
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast"):
            torch.addcmul(tensor, tensor, tensor)


@pytest.mark.parametrize("inside", [True, False])
def test_the_ops_of_torchvision_cast_inside_a_block_only(inside):
    """AMP0078."""
    features, boxes = torch.ones(1, 1, 4, 4).bfloat16(), torch.tensor([[0.0, 0, 0, 1, 1]])
    scores = torch.ones(1).bfloat16()
    with torch.autocast("cpu", dtype=BF16, enabled=inside):
        if inside:
            assert torchvision.ops.roi_align(features, boxes, 1).dtype is BF16
            assert torchvision.ops.nms(boxes[:, 1:], scores, 0.5).tolist() == [0]
            return
        with pytest.raises(RuntimeError, match=r"have the same type as .*rois"):
            torchvision.ops.roi_align(features, boxes, 1)
        with pytest.raises(RuntimeError, match="dets should have the same type as scores"):
            torchvision.ops.nms(boxes[:, 1:], scores, 0.5)
    assert torchvision.ops.roi_align(features.float(), boxes, 1).dtype is FP32


@pytest.mark.parametrize("op", ["nms", "roi_align"])
def test_two_ops_of_torchvision_have_no_rule_for_autocast_on_mps(op):
    """AMP0078."""
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    rules = {
        key
        for key in ("CPU", "CUDA", "XPU", "MPS")
        if has_rule(f"torchvision::{op}", f"Autocast{key}")
    }
    assert rules == {"CPU", "CUDA", "XPU"}


ATTENTION = torch.ones(1, 1, 2, 2).bfloat16()


@pytest.mark.parametrize(
    ("query", "mask", "passes"),
    [
        (BF16, FP32, True),
        (BF16, torch.bool, True),
        (BF16, BF16, True),
        (FP16, FP32, True),
        (FP32, BF16, False),
        (BF16, torch.long, False),
        (BF16, torch.uint8, False),
    ],
)
def test_a_mask_of_attention_is_boolean_or_has_the_dtype_of_the_query(query, mask, passes):
    """AMP0081."""
    q, mask = ATTENTION.to(query), torch.ones(2, 2).to(mask)
    if passes:
        assert F.scaled_dot_product_attention(q, q, q, attn_mask=mask).dtype is query
        return
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert F.scaled_dot_product_attention(q, q, q, attn_mask=mask.bool()).dtype is query
    if mask.is_floating_point():
        mask = mask.to(q.dtype)
        assert F.scaled_dot_product_attention(q, q, q, attn_mask=mask).dtype is query


def test_true_in_a_mask_attends_in_one_function_and_ignores_in_the_other():
    """AMP0081."""
    torch.manual_seed(0)
    x, mask = torch.randn(1, 3, 4), torch.tensor([[1, 1, 0]])
    short = x[:, :2]
    output = F.scaled_dot_product_attention(x, x, x, attn_mask=mask.bool())[:, :2]
    torch.testing.assert_close(output, F.scaled_dot_product_attention(short, short, short))
    tokens, heads = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.randn(2, 1, 3, 4)
    output = F.scaled_dot_product_attention(
        heads, heads, heads, attn_mask=tokens.bool()[:, None, None]
    )
    short_heads = heads[:1, :, :2]
    alone = F.scaled_dot_product_attention(short_heads, short_heads, short_heads)
    torch.testing.assert_close(output[:1, :, :2], alone)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    output = attention(x, x, x, key_padding_mask=mask == 0)[0][:, :2]
    torch.testing.assert_close(output, attention(short, short, short)[0])


def test_a_norm_under_autocast_returns_fp32_which_attention_casts_inside_the_block_only():
    """AMP0097."""
    with cuda_rules(BF16):
        v = torch.ones(1, 1, 2, 2, device="cuda", dtype=BF16)
        q = F.layer_norm(v, (2,))  # an rms_norm only from torch 2.12 on
        assert q.dtype is FP32
        assert F.scaled_dot_product_attention(q, q, v).dtype is BF16
    with pytest.raises(RuntimeError, match="Expected query, key, and value to have the same dtype"):
        F.scaled_dot_product_attention(ATTENTION.float(), ATTENTION.float(), ATTENTION)
    q, k, v = ATTENTION.float(), ATTENTION.float(), ATTENTION
    assert F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v).dtype is BF16


INTEGERS: dict[str, Callable[[], object]] = {
    "counter": lambda: nn.BatchNorm1d(2).num_batches_tracked.mul_(0.99),
    "target": lambda: F.binary_cross_entropy_with_logits(torch.ones(2), torch.ones(2).long()),
    "index": lambda: torch.arange(2).clamp_(0, torch.tensor(1.0)),
    "out": lambda: torch.add(torch.ones(2), 1, out=torch.ones(2).long()),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_an_integer_tensor_cannot_take_a_float(kind):
    """AMP0152."""
    said = r"result type Float can't be cast to the desired output type (Long|long int)"
    with pytest.raises(RuntimeError, match=said):
        INTEGERS[kind]()


def test_an_integer_target_or_index_that_is_converted_first_is_taken():
    """AMP0152."""
    target = torch.ones(2).long()
    assert F.binary_cross_entropy_with_logits(torch.ones(2), target.float()) > 0
    assert torch.arange(2).clamp_(0, torch.tensor(1.0).long()).tolist() == [0, 1]
    assert target.mul(0.99).dtype is FP32  # a new tensor
    average = nn.BatchNorm1d(2).state_dict()
    for name, tensor in nn.BatchNorm1d(2).state_dict().items():
        if not tensor.is_floating_point():
            average[name].copy_(tensor)
        else:
            average[name].mul_(0.5).add_(tensor, alpha=0.5)


@pytest.mark.parametrize("weight", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_times_its_scale_is_fp32_and_the_bias_is_not(weight):
    """AMP0153."""
    x, bias, scale = torch.ones(1, 2).bfloat16(), torch.ones(2).bfloat16(), torch.ones(2, 1)
    product = torch.ones(2, 2).to(weight).to(x.dtype) * scale
    assert (torch.ones(2, 2).to(weight).to(x.dtype) * scale[:, 0]).dtype is FP32  # a vector
    with pytest.raises(RuntimeError, match=r"self and mat2 .* but got BFloat16 and Float"):
        F.linear(x, product, bias)
    with torch.autocast("cpu", dtype=BF16):
        assert F.linear(x, product, bias).dtype is BF16
        for left, name in ((product.double(), "Double"), (product.to(torch.int8), "Char")):
            with pytest.raises(RuntimeError, match=f"self and mat2 .* but got BFloat16 and {name}"):
                F.linear(x, left, bias)
    assert F.linear(x, product.to(x.dtype), bias).dtype is BF16
    assert (torch.ones(2, 2).to(weight).to(x.dtype) * scale[0, 0]).dtype is BF16


@pytest.mark.parametrize(
    ("part", "got"), [("weight", "Float and Half"), ("bias", "Half and Float")]
)
def test_a_partly_converted_layer_raises_until_it_is_converted_whole(part, got):
    """AMP0153."""
    layer = nn.Linear(2, 2)
    getattr(layer, part).data = getattr(layer, part).data.half()
    x = torch.ones(1, 2, dtype=layer.weight.dtype)
    with pytest.raises(
        RuntimeError, match=f"self and mat2 must have the same dtype, but got {got}"
    ):
        layer(x)
    assert layer.to(x.dtype)(x).dtype is x.dtype


class Norm(nn.Module):
    """As the norms of language models: the weight is multiplied last."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden):
        return self.weight * F.rms_norm(hidden.float(), (4,)).to(hidden.dtype)


def test_a_norm_in_fp32_before_a_layer_in_bf16_needs_autocast():
    """AMP0154, as after `peft_module_casting_to_bf16` of TRL."""
    model, x = nn.Sequential(Norm(), nn.Linear(4, 4).bfloat16()), torch.ones(1, 4).bfloat16()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 .* but got Float and BFloat16"):
        model(x)
    with torch.autocast("cpu", dtype=BF16):
        assert model(x).dtype is BF16


@pytest.mark.filterwarnings("ignore")  # of the packages that PEFT imports
@pytest.mark.parametrize(("casts", "dtype"), [(True, FP32), (False, BF16)])
def test_peft_keeps_adapters_in_fp32_unless_told_otherwise(casts, dtype):
    """AMP0154."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], r=2)
    base = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=casts)
    adapters = {p.dtype for name, p in model.named_parameters() if "lora" in name}
    assert adapters == {dtype}
    assert model(torch.ones(1, 4).bfloat16()).dtype is BF16  # the layers of PEFT cast


@pytest.mark.filterwarnings("ignore")  # of the packages that PEFT imports
def test_the_model_inside_a_prepared_peft_model_runs_without_autocast():
    """AMP0154: `generate` of a PEFT model calls the model inside."""
    peft, accelerate = pytest.importorskip("peft"), pytest.importorskip("accelerate")
    base = nn.Sequential(Norm(), nn.Linear(4, 4).bfloat16())
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["1"], r=2))
    accelerate.state.AcceleratorState._reset_state()
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    accelerate.state.AcceleratorState._reset_state()
    x = torch.ones(1, 4).bfloat16()
    assert prepared(x).dtype is FP32
    with pytest.raises(RuntimeError, match="the same dtype"):
        prepared.get_base_model()(x)


def test_weights_in_fp8_are_cast_by_hand_or_by_autocast():
    """AMP0155."""
    x, weight = torch.ones(1, 2).bfloat16(), torch.ones(2, 2).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="c10::BFloat16 != c10::Float8_e4m3fn"):
        F.linear(x, weight)
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        x + weight
    assert F.linear(x, weight.to(x.dtype)).dtype is BF16
    scaled, scale = torch.tensor([[3.0, 896.0]]), torch.tensor(2.0)  # 896 is larger than 448
    weight_and_scale = (scaled / scale).to(torch.float8_e4m3fn), scale
    assert torch.equal(weight_and_scale[0].to(x.dtype) * scale, scaled.to(x.dtype))
    with torch.autocast("cpu", dtype=BF16):
        assert F.linear(x, weight).dtype is BF16
    with cuda_rules():
        x, weight = torch.ones(1, 2, device="cuda"), torch.ones(2, 2, device="cuda")
        assert F.linear(x, weight.to(torch.float8_e4m3fn)).dtype is FP16


def test_an_ordinary_matmul_refuses_the_int8_weight_of_a_layer():
    """AMP0156."""
    x, weight = torch.ones(1, 2).half(), torch.ones(2, 2).to(torch.int8)
    with pytest.raises(RuntimeError, match=r"self and mat2 .* but got Half and Char"):
        F.linear(x, weight, torch.ones(2).half())


def test_a_weight_takes_a_gradient_of_its_own_dtype_or_of_the_one_it_is_told():
    """AMP0159."""
    master, weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).half())
    with pytest.raises(RuntimeError, match="assign a gradient with dtype 'c10::Half'"):
        master.grad = torch.ones(1).half()
    with pytest.raises(RuntimeError, match="assign a gradient with dtype 'float'"):
        weight.grad = torch.ones(1)
    master.grad = torch.ones(1).half().to(master.dtype)
    weight.grad_dtype = FP32
    weight.grad = torch.ones(1)
    assert (master.grad.dtype, weight.grad.dtype) == (FP32, FP32)
    torch.optim.SGD([weight], lr=0.5).step()
    assert weight.item() == 0.5
    with pytest.raises(RuntimeError, match="expected dtype c10::Half"):
        torch.optim.Adam([weight]).step()
    with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
        torch.optim.SGD([weight], fused=True).step()


def test_a_bias_in_fp32_that_is_added_to_a_matmul_raises_its_dtype():
    """AMP0290."""
    x, weight, bias = (
        torch.randn(3, 4),
        nn.Parameter(torch.randn(4, 2)),
        nn.Parameter(torch.ones(2)),
    )
    with torch.autocast("cpu", dtype=BF16):
        y = torch.matmul(x, weight)
        assert (y + bias).dtype is FP32
        cast, linear = y + bias.to(y.dtype), F.linear(x, weight.T, bias)
    assert cast.dtype is linear.dtype is BF16
    # One way rounds the product and the sum to bf16, the other way only the sum.
    bound = 2**-8 * (y.abs() + 2 * linear.abs()).float()
    assert ((cast - linear).float().abs() <= bound).all()


def helper(x: torch.Tensor, fixed: bool) -> torch.Tensor:
    """As a library's layer that asks whether autocast is on."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return x
    return x.half() if fixed else x.to(torch.get_autocast_dtype(device_type))


def test_a_dtype_that_is_fixed_in_a_layer_is_not_that_of_the_block():
    """AMP0291."""
    large = torch.full((2,), 1e5)
    with torch.autocast("cpu", dtype=BF16):
        assert helper(large, fixed=True).isinf().all()
        assert helper(large, fixed=False).dtype is BF16
        assert helper(large, fixed=False).isfinite().all()
        with torch.autocast("cpu", enabled=False):
            assert helper(large, fixed=True).dtype is FP32


def test_the_output_of_a_matmul_refuses_fp32_values_under_autocast():
    """AMP0019: a buffer that is the output of an op."""
    with torch.autocast("cpu", dtype=BF16):
        buffer = torch.ones(2, 2) @ torch.ones(2, 2)
        values = torch.ones(1, 2)
        with pytest.raises(RuntimeError, match="index_add_"):
            buffer.index_add_(0, torch.tensor([0]), values)
        buffer.index_add_(0, torch.tensor([0]), values.to(buffer.dtype))


def test_mixed_precision_keeps_weights_gradients_and_state_in_fp32():
    """AMP0294."""
    layer, dtypes = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    adam = torch.optim.Adam(layer.parameters())
    with torch.autocast("cpu", dtype=BF16):
        loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    adam.step()
    assert dtypes == [BF16]
    weight = layer.weight
    assert weight.dtype is weight.grad.dtype is adam.state[weight]["exp_avg"].dtype is FP32
    assert layer.bfloat16().weight.dtype is BF16


def test_some_ops_return_fp32_in_a_block_and_a_cpu_has_other_ones():
    """AMP0295."""
    with cuda_rules():
        h = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        assert h.dtype is FP16
        raised = [h.exp(), h.log(), h**2, h.softmax(-1), h.sum(), h.cumsum(0), h.norm()]
        raised += [F.layer_norm(h, (2,)), F.mse_loss(h, h)]
        assert {tensor.dtype for tensor in raised} == {FP32}
        assert (h.softmax(-1) @ h).dtype is FP16
        assert h.exp_().dtype is FP16
    with torch.autocast("cpu", dtype=BF16):
        h = torch.ones(2, 2) @ torch.ones(2, 2)
        assert h.exp().dtype is h.softmax(-1).dtype is h.sum().dtype is BF16
        loss = F.mse_loss(h, h)
        assert loss.dtype is FP32
        assert loss.to(h.dtype).dtype is BF16
        assert (h.float().softmax(-1) @ h).dtype is BF16
    assert torch.tensor(11.1).half().exp_().isinf()


class NormInFp32(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.norm(x.float())


def outputs_and_weights(norm: nn.Module) -> tuple[torch.Tensor, list[nn.Parameter]]:
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))
    with torch.autocast("cpu", dtype=BF16):
        return model(torch.randn(8, 4)).squeeze(), list(model.parameters())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_a_batched_backward_pass_needs_its_norms_in_fp32(norm):
    """AMP0301."""

    def batched(output, weights):
        def gradients(vector):
            return torch.autograd.grad(output, weights, vector, retain_graph=True)

        return torch.vmap(gradients)(torch.eye(8, dtype=output.dtype))

    output, weights = outputs_and_weights(norm)
    found = (
        "expected scalar type BFloat16 but found Float|Expected scalar types of X and dY are same"
    )
    with pytest.raises(RuntimeError, match=found):
        batched(output, weights)
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match=found):
        batched(output, weights)
    with pytest.raises(RuntimeError, match=found):
        batched(output.float(), weights)
    for vector in torch.eye(8, dtype=BF16):
        assert torch.autograd.grad(output, weights, vector, retain_graph=True)[0].isfinite().all()
    output, weights = outputs_and_weights(NormInFp32(norm))
    together = batched(output, weights)
    for i, vector in enumerate(torch.eye(8, dtype=BF16)):
        alone = torch.autograd.grad(output, weights, vector, retain_graph=True)
        for all_of_them, one in zip(together, alone, strict=True):
            torch.testing.assert_close(all_of_them[i], one, rtol=1e-3, atol=1e-5)


def test_on_cuda_batch_and_instance_norm_return_16_bits_and_other_norms_fp32():
    """AMP0301."""
    with cuda_rules():
        x, weight = torch.ones(2, 4, 4, device="cuda").half(), torch.ones(4, device="cuda")
        assert F.batch_norm(x, None, None, weight, weight, training=True).dtype is FP16
        assert F.instance_norm(x, weight=weight, bias=weight).dtype is FP16
        assert F.layer_norm(x, (4,), weight, weight).dtype is FP32
        assert F.group_norm(x, 2, weight, weight).dtype is FP32


def test_autocast_casts_also_what_was_just_converted_to_fp32():
    """AMP0302."""
    q, k, large = torch.randn(3, 4), torch.randn(3, 4), torch.full((1, 4), 300.0)
    with torch.autocast("cpu", dtype=BF16):
        assert (q.float() @ k.float().mT).dtype is BF16
        assert torch.einsum("ij,kj->ik", q.float(), k.float()).dtype is BF16
        assert F.linear(q.float(), k.float()).dtype is BF16
        assert F.conv1d(q.float()[None], torch.ones(1, 3, 1)).dtype is BF16
        assert (q.float() + k.float()).dtype is FP32
        with torch.autocast("cpu", enabled=False):
            scores = q.float() @ k.float().mT
        late = (q.float() @ k.float().mT).float()
    assert torch.equal(scores, q @ k.mT)
    assert not torch.equal(late, q @ k.mT)
    with torch.autocast("cpu", dtype=FP16):
        assert (large @ large.mT).float().isinf()


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
def test_cast_inputs_needs_an_output_in_that_dtype(output):
    """AMP0020."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return (x @ weight).to(output)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            return gradient @ weight.T, None

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = Product.apply(x, torch.eye(2))
    if output is torch.float32:
        result.sum().backward()
        assert torch.equal(x.grad, torch.ones(2, 2))
    else:
        with pytest.raises(RuntimeError, match="same dtype"):
            result.sum().backward()


def test_a_decorated_backward_needs_a_decorated_forward():
    """AMP0020."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        output = Doubled.apply(x)
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        output.sum().backward()


def test_an_array_of_numpy_is_float64_by_default():
    """AMP0151."""
    array = np.linspace(0, 1, 3)
    assert array.dtype == np.random.default_rng(0).random(3).dtype == np.float64
    assert torch.from_numpy(array).dtype is torch.float64


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_checkpoint_recomputes_in_the_dtype_of_the_block(dtype):
    """AMP0020. The default of a CPU is bf16, the one of CUDA fp16."""
    dtypes = []

    def block(x):
        y = x @ torch.ones(2, 2)
        dtypes.append(y.dtype)
        return y * y

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    y.float().sum().backward()
    assert dtypes == [dtype, dtype]
    assert torch.get_autocast_dtype("cuda") is FP16


def test_fp16_is_infinite_from_65520_on():
    """AMP0021: weights of bf16 models, and an activation."""
    assert torch.tensor([65519.0, 65520.0]).half().isinf().tolist() == [False, True]
    assert torch.tensor(65520.0).bfloat16().half().isinf()
    assert (torch.tensor([[4095.0]]).half() @ torch.tensor([[16.0]]).half()).isinf()  # 65520


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, FP16, FP32], ids=str)
def test_class_targets_are_int64_or_uint8(dtype):
    """AMP0151."""
    x, target = torch.ones(1, 2), torch.tensor([1])
    said = "expected target dtype to be Long or Byte, but got|expected scalar type Long but found"
    with pytest.raises(RuntimeError, match=said):
        F.cross_entropy(x, target.to(dtype))
    for taken in (target.to(dtype).long(), target.byte()):
        assert F.cross_entropy(x, taken).isfinite()


def test_autocast_leaves_layers_of_a_float64_default_alone():
    """AMP0151."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=BF16):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float64
    finally:
        torch.set_default_dtype(FP32)


def test_a_layer_in_half_precision_takes_a_float64_input_in_its_own_dtype():
    """AMP0151."""
    layer, x = nn.Linear(2, 2).half(), torch.ones(1, 2).double()
    with pytest.raises(RuntimeError, match="but got Double and Half"):
        layer(x)
    assert layer(x.to(layer.weight.dtype)).dtype is FP16
