"""Each remedy for a model of which there is no fake copy: lazy layers, TorchScript, quantised."""

import functools
import re
import warnings

import pytest
import torch
from remedy_tests import does, says
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from amp_lab import forecast_inference, forecast_memory, xray
from amp_lab.cli import main
from amp_lab.core.errors import TraceError
from amp_lab.core.remedies import REMEDIES

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore"),  # lazy layers, TorchScript and quantize_dynamic warn
]
TRACES = pytest.mark.parametrize(
    "trace",
    [
        xray,
        functools.partial(xray, device_type="cpu", real=True),
        functools.partial(forecast_memory, precision="bf16"),
    ],
    ids=["xray", "xray for real", "forecast"],
)


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(4, 2))


@does("trace.lazy")
@TRACES
def test_a_lazy_model_that_was_called_once(trace):
    model, x = lazy(), torch.randn(4, 8)
    with pytest.raises(TraceError) as refused:
        trace(model, x)
    assert str(refused.value).startswith("0.weight belongs to a lazy layer ")
    assert says("trace.lazy", str(refused.value))
    assert isinstance(model[0], nn.LazyLinear)
    (call,) = re.findall(r"model\(x\)", REMEDIES["trace.lazy"].text)
    eval(call, {"model": model, "x": x})
    assert trace(model, x)


def test_a_lazy_model_from_the_command_line_is_called_where_it_is_built(tmp_path, capsys):
    path = tmp_path / "lazy.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def lazy():\n    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())\n\n"
        "def called():\n    model, x = lazy(), torch.rand(4, 8)\n    model(x)\n    return model\n"
    )
    for command in (["xray"], ["xray", "--device", "cpu", "--real"], ["memory"]):
        given = [command[0], f"{path}:NAME", "--input", "4,8", *command[1:]]
        assert main([part.replace("NAME", "lazy") for part in given]) == 2
        said = capsys.readouterr()
        assert says("trace.lazy", said.err)
        assert len(said.err.splitlines()) == 1
        assert main([part.replace("NAME", "called") for part in given]) == 0


@does("trace.torchscript")
@pytest.mark.parametrize("how", ["scripted", "traced", "a part of it"])
@TRACES
def test_the_module_that_was_scripted(trace, how):
    original, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(4, 8)
    if how == "scripted":
        model = torch.jit.script(original)
    elif how == "traced":
        model = torch.jit.trace(original, x)
    else:
        model = nn.Sequential(torch.jit.script(original), nn.Linear(4, 4))
    with pytest.raises(TraceError) as refused:
        trace(model, x)
    place = "module '0'" if how == "a part of it" else "the model"
    assert str(refused.value) == f"{place} is TorchScript: {REMEDIES['trace.torchscript'].text}"
    assert trace(original, x)


@does("trace.quantised")
@pytest.mark.parametrize("trace", [xray, functools.partial(forecast_memory, precision="bf16")])
def test_a_dynamically_quantised_model_before_it_is_quantised(trace):
    original, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(original, {nn.Linear})
    with pytest.raises(TraceError) as refused:
        trace(model, x)
    assert str(refused.value).startswith("module '0' is a quantised Linear, ")
    assert says("trace.quantised", str(refused.value))
    assert trace(original, x)


class OneHead(nn.Module):
    """Attention by a function of query, key and value, (N, 4, T, 16) each."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.inward, self.outward = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        query, key, value = self.inward(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.outward(self.attend(query, key, value).transpose(1, 2).flatten(2))


@does("trace.flex_attention")
@pytest.mark.parametrize(
    "attend",
    [flex_attention, torch.compile(flex_attention, backend="eager")],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize("device_type", ["mps", "cpu"])
def test_flex_attention_is_traced_as_on_a_gpu(device_type, attend):
    x = torch.randn(2, 128, 64)
    for trace in (xray, functools.partial(forecast_memory, precision="bf16")):
        with pytest.raises(TraceError) as refused:
            trace(OneHead(attend), x, device_type=device_type)
        assert says("trace.flex_attention", str(refused.value))
        assert trace(OneHead(attend), x, device_type="cuda")
    assert forecast_inference(OneHead(attend), x, precision="bf16", device_type=device_type)


@does("trace.no_fake")
@pytest.mark.parametrize("is_custom_op", [True, False], ids=["custom_op", "define"])
def test_an_op_of_torch_library_with_a_fake(is_custom_op):
    name = f"amp_lab_tests::square{int(is_custom_op)}"
    if is_custom_op:
        op = torch.library.custom_op(
            name, torch.square, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
    else:
        torch.library.define(name, "(Tensor x) -> Tensor")
        torch.library.impl(name, "CPU", torch.square)
        op = getattr(torch.ops.amp_lab_tests, f"square{int(is_custom_op)}")
    torch.library.register_autograd(
        name,
        lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    class Squares(nn.Linear):
        def forward(self, x):
            return op(super().forward(x))

    model, x = Squares(8, 8), torch.randn(4, 8)
    traces = (xray, functools.partial(forecast_memory, precision="bf16"))
    for trace in traces:
        with pytest.raises(TraceError) as refused:
            trace(model, x)
        assert says("trace.no_fake", str(refused.value))
    assert xray(model, x, device_type="cpu", real=True).raised is None
    (registered,) = re.findall(r"@(torch\.library\.register_fake\(.*?\))", str(refused.value))
    eval(registered, {"torch": torch})(lambda x: torch.empty_like(x))
    for trace in traces:
        assert trace(model, x)
