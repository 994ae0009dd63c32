"""All four tools on flex_attention, own ops, experts, scans, int8 and LoRA, against real runs."""

import pytest
import torch
from library_checks import dtypes_of_modules, module_dtypes
from memory_models import bytes_kept, loss_of, real_peaks, tensors_given
from unusual_models import LIBRARY_OF, MODELS, REFUSED, WIDTH

from amp_lab import advise, forecast_inference, forecast_memory, rehearse, xray
from amp_lab.core.errors import TraceError
from amp_lab.model_call import ModelCall
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
    if name not in REFUSED
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
    assert f"{op} in the model itself: its FLOPs are unknown" in said
    for forecast in (forecast_memory, forecast_inference):
        text = str(forecast(model, *inputs, precision="bf16"))
        assert f"Of {op} only results count, not what the kernel allocates." in text
    found = rehearse(model, *inputs, formats=["fp8"])
    assert f"Not rehearsed: {op} with weight, which torch computes." in found.watch


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
    if "flex" in name:
        for use in ("training", "inference"):
            with pytest.raises(TraceError, match=r"follow flex_attention; rehearse it .*$"):
                rehearse(model, *inputs, formats=["fp8"], use=use)
        return
    found = rehearse(model, *inputs, formats=["fp8"])
    assert found.layers


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_advice_is_given_or_refused_in_a_line(name):
    model, inputs = built(name)
    if "flex" in name:
        with pytest.raises(TraceError, match=r"follow flex_attention; X-ray it .*$"):
            advise(model, *inputs, device="cpu", minutes=0.02)
        return
    assert advise(model, *inputs, device="cpu", minutes=0.02).candidates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao int8", "torchao float8"])
def test_quantised_weights_are_not_quantised_again(name):
    model, inputs = built(name)
    table = inference_table(ModelCall(model, inputs), device_type="cpu")
    assert not {forecast.way for forecast in table.forecasts} & {"int8", "int4"}
    assert all(forecast.weights > 2 * WIDTH * 64 for forecast in table.forecasts)
