"""All four tools on flex_attention, own ops, experts, scans, int8 and LoRA, against real runs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from library_checks import dtypes_of_modules, module_dtypes
from memory_models import bytes_kept, loss_of, real_peaks, tensors_given
from torch.nn.attention.flex_attention import flex_attention
from unusual_models import FLEX, LIBRARY_OF, MODELS, REFUSED, WIDTH, FlexAttention

from amp_lab import advise, forecast_inference, forecast_memory, rehearse, xray
from amp_lab.core.errors import TraceError
from amp_lab.model_call import ModelCall
from amp_lab.tracing.flex_attention import flex_attention_traced
from amp_lab.tracing.inference_memory import inference_table

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]
FP32, BF16 = torch.float32, torch.bfloat16
# Loading torchao or transformers takes seconds.
TRACED = [
    pytest.param(name, marks=pytest.mark.slow) if name in LIBRARY_OF else name
    for name in MODELS
    if name not in REFUSED and name not in FLEX
]


def built(name):
    if name in LIBRARY_OF:
        pytest.importorskip(LIBRARY_OF[name])
    return MODELS[name]()


@pytest.mark.parametrize("name", TRACED)
def test_an_xray_on_fakes_is_that_of_a_real_run(name):
    model, inputs = built(name)
    fake, real = (
        xray(model, *inputs, device_type="cpu", dtype=BF16, real=real) for real in (False, True)
    )
    assert fake.outputs == real.outputs
    if not fake.decisions:  # they are those of a run in fp32
        # Some checks of integers run on values alone. Their rows have no dtype.
        assert [row for row in fake.rows if row.dtype] == [row for row in real.rows if row.dtype]
        assert fake.casts == real.casts
    assert module_dtypes(fake) == dtypes_of_modules(model, inputs, {})
    assert xray(model, *inputs, device_type="cuda", dtype=BF16).raised is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRACED)
def test_the_forecast_is_the_memory_of_a_real_step(name, precision):
    model, inputs = built(name)
    options = {"device_type": "cpu", "precision": precision, "optimizer": "sgd"}
    forecast = forecast_memory(model, *inputs, loss_fn=loss_of, **options)
    kept = bytes_kept(model, precision, *inputs)
    assert forecast.activations + forecast.cast_kept == kept
    given = sum(tensor.nbytes for tensor in tensors_given(inputs))
    there = forecast.weights + forecast.buffers + given
    forward, backward, gradients = real_peaks(model, precision, *inputs)
    assert forecast.gradients == gradients
    assert forecast.phases["forward"] == pytest.approx(there + forward, rel=0.01)
    assert forecast.phases["backward"] == pytest.approx(there + backward, rel=0.01)


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_fakes_cannot_run_is_refused_in_a_line(name, device_type):
    model, inputs = built(name)
    for trace, options in ((xray, {}), (forecast_memory, {"precision": "bf16"})):
        with pytest.raises(TraceError, match=REFUSED[name]) as refused:
            trace(model, *inputs, device_type=device_type, **options)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_on_a_gpu_is_one_row_and_saves_what_a_fused_kernel_saves(name):
    model, inputs = built(name)
    plain = FlexAttention(False)
    plain.forward = functools.partial(_with_plain_attention, plain)
    options = {"device_type": "cuda", "dtype": BF16}
    found, expected = xray(model, *inputs, **options), xray(plain, *inputs, **options)
    (row,) = (row for row in found.rows if row.op == "flex_attention")
    (plain_row,) = (row for row in expected.rows if row.op == "scaled_dot_product_attention")
    assert (row.dtype, row.out_dtypes, row.flops) == (BF16, (BF16,), plain_row.flops)
    assert found.outputs == expected.outputs
    options = {"device_type": "cuda", "precision": "bf16", "loss_fn": loss_of}
    found, expected = (forecast_memory(m, *inputs, **options) for m in (model, plain))
    of_dropout = 24  # bytes: the generator's state, which flash attention saves as well
    assert found.activations == expected.activations - of_dropout
    assert found.gradients == expected.gradients


def _with_plain_attention(layer, x):
    """The forward pass of `FlexAttention` with the attention of `torch.nn.functional`."""
    q, k, v = (
        part.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v)
    return layer.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", FLEX)
def test_frozen_flex_attention_on_a_cpu_is_that_of_a_real_run(name):
    model, inputs = built(name)
    model.requires_grad_(False)
    fake, real = (
        xray(model, *inputs, device_type="cpu", dtype=BF16, real=real) for real in (False, True)
    )
    assert fake.outputs == real.outputs
    for rows in (fake.rows, real.rows):
        (row,) = (row for row in rows if row.op == "flex_attention")
        assert (row.dtype, row.out_dtypes) == (BF16, (BF16,))
    assert fake.casts == real.casts


def test_real_flex_attention_gives_the_values_and_gradients_of_its_formula():
    query, key, value = torch.randn(3, 2, 2, 16, 8, requires_grad=True).unbind()
    bias = torch.randn(16, 16, requires_grad=True)

    def with_bias(score, batch, head, row, column):
        return score + bias[row, column]

    with flex_attention_traced(any_device=True):
        attended = flex_attention(query, key, value, score_mod=with_bias)
    expected = torch.softmax(query @ key.mT / 8**0.5 + bias, -1) @ value
    torch.testing.assert_close(attended, expected)
    tensors = (query, key, value, bias)
    found, gradients = (
        torch.autograd.grad(output.square().sum(), tensors, retain_graph=True)
        for output in (attended, expected)
    )
    torch.testing.assert_close(found, gradients)


def test_complex_numbers_compute_in_the_dtype_of_their_parts():
    model, inputs = built("scan of complex states")
    rows = xray(model, *inputs, device_type="cuda", dtype=BF16).rows
    of_complex = [row for row in rows if torch.complex64 in row.in_dtypes + row.out_dtypes]
    assert len(of_complex) > 16
    assert {row.dtype for row in of_complex} == {FP32}


def test_of_an_own_op_it_is_said_what_is_not_known():
    model, inputs = built("own op")
    op = "amp_lab_tests::scaled_product"
    said = "\n".join(xray(model, *inputs, dtype=FP32).advice)
    assert f"{op} in the model itself: the FLOPs of this op are unknown" in said
    for forecast in (forecast_memory, forecast_inference):
        text = str(forecast(model, *inputs, precision="bf16"))
        assert (
            f"For {op}, only the results are counted, not the memory that the kernel allocates."
            in text
        )
    found = rehearse(model, *inputs, formats=["fp8"])
    assert f"Not rehearsed: {op} with weight. torch computes this op in fp32." in found.watch


@pytest.mark.slow
def test_packed_sequences_get_the_mask_of_a_real_run():
    model, (tokens,) = built("peft lora")
    positions = torch.arange(8).repeat(2, 2)  # two sequences of eight tokens in each row
    for given in ({}, {"position_ids": positions}):
        real = bytes_kept(model, "bf16", tokens, **given)
        options = {"device_type": "cpu", "precision": "bf16", "loss_fn": loss_of}
        forecast = forecast_memory(model, tokens, **options, **given)
        assert forecast.activations + forecast.cast_kept == real


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LIBRARY_OF])
def test_a_rehearsal_names_the_layers_or_refuses_in_a_line(name):
    model, inputs = built(name)
    for use in ("training", "inference"):
        found = rehearse(model, *inputs, formats=["fp8"], use=use)
        assert found.layers


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_advice_is_given_or_refused_in_a_line(name):
    model, inputs = built(name)
    if name in FLEX:
        with pytest.raises(TraceError, match=r"does not support backward on CPU.*$"):
            advise(model, *inputs, device="cpu", minutes=0.02)
        model.requires_grad_(False).eval()
    assert advise(model, *inputs, device="cpu", minutes=0.02).candidates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao int8", "torchao float8"])
def test_quantised_weights_are_not_quantised_again(name):
    model, inputs = built(name)
    table = inference_table(ModelCall(model, inputs), device_type="cpu")
    assert not {forecast.way for forecast in table.forecasts} & {"int8", "int4"}
    assert all(forecast.weights > 2 * WIDTH * 64 for forecast in table.forecasts)
