"""X-ray and forecast on 60 models of other libraries: each held against a real run on the CPU.

They run weekly, where the libraries are installed: see CONTRIBUTING.
"""

import copy

import pytest
import torch
from library_checks import dtypes_of_modules, module_dtypes
from library_models import MODELS, REFUSED, built_for_test
from memory_models import bytes_kept, loss_of, real_peaks, tensors_given
from torch.utils.flop_counter import FlopCounterMode

from amp_lab import forecast_memory, xray
from amp_lab.core.errors import TraceError

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.filterwarnings("ignore"),  # theirs
]
NAMES = sorted(MODELS)
ON_CUDA = sorted(MODELS.keys() - REFUSED)
# They look at the values of a mask, and make it in another way where there are none.
OTHER_MASKS = ("BartForConditionalGeneration",)


def matmuls(found):
    return [(row.module, row.op, row.flops, row.out_dtypes) for row in found.rows if row.flops]


def dtypes(found):
    return [(row.module, row.op, row.in_dtypes, row.out_dtypes) for row in found.rows]


def test_there_are_sixty_of_which_at_most_two_are_refused():
    assert len(MODELS) >= 60
    assert len(REFUSED) <= 2


@pytest.fixture
def built(request):
    return built_for_test(request.param)


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_a_fake_trace_agrees_with_a_real_run(built):
    model, args, kwargs = built
    for dtype in (torch.float32, torch.bfloat16):
        real, fake = (
            xray(model, *args, device_type="cpu", dtype=dtype, real=real, **kwargs)
            for real in (True, False)
        )
        assert not fake.raised
        assert [*fake.outputs] == [*real.outputs]
        assert fake.output_dtypes == real.output_dtypes
        if fake.decisions and dtype is torch.bfloat16:  # they are those of a run in fp32
            assert dtypes(fake) == dtypes(real)
            continue
        if type(model).__name__ not in OTHER_MASKS:
            assert fake.rows == real.rows
        assert matmuls(fake) == matmuls(real)
        assert fake.outputs == real.outputs


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_modules_return_the_dtypes_that_hooks_of_a_real_run_see(built):
    model, args, kwargs = built
    fake = xray(model, *args, device_type="cpu", dtype=torch.bfloat16, **kwargs)
    assert module_dtypes(fake) == dtypes_of_modules(model, args, kwargs)


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_flops_are_those_that_torch_counts(built):
    model, args, kwargs = built
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **kwargs)
    rows = xray(model, *args, device_type="cpu", **kwargs).rows
    found = sum(row.flops for row in rows if row.op != "_grouped_mm")  # which torch leaves out
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_flops_of_grouped_products_are_those_counted_by_hand():
    model, args, kwargs = built_for_test("mixtral")
    rows = xray(model, *args, device_type="cpu", **kwargs).rows
    layers, tokens, experts_a_token, width, hidden = 2, 2 * 16, 2, 64, 128
    matmuls = width * 2 * hidden + hidden * width  # gate and up in one, then down
    found = sum(row.flops for row in rows if row.op == "_grouped_mm")
    assert found == layers * 2 * tokens * experts_a_token * matmuls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_the_forecast_agrees_with_a_real_step(built, precision):
    model, args, kwargs = built
    forecast = forecast_memory(
        *(model, *args),
        device_type="cpu",
        precision=precision,
        optimizer="sgd",
        loss_fn=loss_of,
        **kwargs,
    )
    kept = bytes_kept(model, precision, *args, **kwargs)
    # Values in bf16 may decide other sizes than those of the run in fp32 that the forecast takes.
    takes_decisions = precision == "bf16" and forecast.caveats
    makes_another_mask = type(model).__name__ in OTHER_MASKS
    off = 0.01 if takes_decisions or makes_another_mask else 0
    assert forecast.activations + forecast.cast_kept == pytest.approx(kept, rel=off)
    inputs = sum(tensor.nbytes for tensor in tensors_given((args, kwargs)))
    there = forecast.weights + forecast.buffers + inputs
    forward, backward, gradients = real_peaks(model, precision, *args, **kwargs)
    assert forecast.gradients == gradients
    assert forecast.phases["forward"] == pytest.approx(there + forward, rel=0.05)
    assert forecast.phases["backward"] == pytest.approx(there + backward, rel=0.05)


@pytest.mark.parametrize("built", ON_CUDA, indirect=True)
def test_the_model_is_as_it_was(built):
    model, args, kwargs = built
    if hasattr(model, "config"):
        model(*args, **kwargs)  # some note there what they were first used for
    before = copy.deepcopy(model.state_dict())
    config = copy.deepcopy(getattr(model, "config", None))
    xray(model, *args, device_type="cuda", **kwargs)
    forecast_memory(model, *args, device_type="cuda", precision="bf16", **kwargs)
    assert str(getattr(model, "config", None)) == str(config)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("built", REFUSED, indirect=True)
def test_what_cannot_be_traced_says_what_to_trace_instead(built, request):
    model, args, kwargs = built
    words = REFUSED[request.node.callspec.params["built"]]
    with pytest.raises(TraceError, match=words):
        xray(model, *args, device_type="cuda", **kwargs)
