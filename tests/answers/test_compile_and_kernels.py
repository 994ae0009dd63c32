"""docs/compile_and_kernels.md: its code runs, and PyTorch does what the page says."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import xray

PAGE = (Path(__file__).parents[2] / "docs" / "compile_and_kernels.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n### ")[1:]}
BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore:.*CUDA"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def code_of(words: str) -> str:
    """The code of the section whose heading contains these words."""
    (section,) = (text for heading, text in SECTIONS.items() if words in heading)
    (code,) = FENCE.findall(section)
    return code


def rope(q, cosine, sine):
    """A rotary embedding, as Llama has it."""
    first, second = q.chunk(2, -1)
    return q * cosine + torch.cat((-second, first), -1) * sine


@pytest.fixture
def compiler():
    """torch's compiler, without what an earlier test has compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def error_of(result, exact) -> float:
    """The relative error."""
    return ((result.double() - exact).norm() / exact.norm()).item()


def rope_inputs() -> list[torch.Tensor]:
    """Queries (2, 4, 512, 64), and the cosines and sines (512, 64) of their positions."""
    frequencies = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
    angles = torch.outer(torch.arange(512), frequencies).repeat(1, 2)
    return [values.to(BF16) for values in (torch.randn(2, 4, 512, 64), angles.cos(), angles.sin())]


def test_the_compiled_result_is_nearer_to_the_exact_one(compiler):
    """AMP0095."""
    inputs = rope_inputs()
    exact = rope(*(values.double() for values in inputs))
    eager, compiled = rope(*inputs), torch.compile(rope)(*inputs)
    assert (eager != compiled).float().mean().item() == pytest.approx(0.29, abs=0.01)
    assert error_of(eager, exact) == pytest.approx(2.3e-3, abs=5e-5)
    assert error_of(compiled, exact) == pytest.approx(1.7e-3, abs=5e-5)


@pytest.mark.skipif(not hasattr(torch._inductor.config, "numerics"), reason="new in torch 2.15")
def test_strict_numerics_keep_the_bits_of_eager_mode(compiler):
    """AMP0095."""
    inputs = rope_inputs()
    names = {"torch": torch, "function": rope}
    exec(code_of("same bits"), names)
    assert torch.equal(names["compiled"](*inputs), rope(*inputs))
    torch.compiler.reset()
    emulated = torch.compile(rope, options={"emulate_precision_casts": True})
    assert torch.equal(emulated(*inputs), rope(*inputs))


@pytest.mark.skipif(not hasattr(torch._inductor.config, "numerics"), reason="new in torch 2.15")
@pytest.mark.parametrize("options", [{"numerics": "strict"}, {"emulate_precision_casts": True}])
def test_strict_numerics_round_a_number_to_16_bits_on_a_cpu(options, compiler):
    """AMP0095."""

    def scaled(x):
        return x * 1.3

    x = torch.randn(64, 64).to(BF16)
    compiled = torch.compile(scaled, options=options)(x)
    assert not torch.equal(compiled, scaled(x))
    assert torch.equal(compiled, x * torch.tensor(1.3, dtype=BF16).item())


@pytest.mark.skipif(not hasattr(torch._inductor.config, "numerics"), reason="new in torch 2.15")
@pytest.mark.parametrize("options", [{"numerics": "strict"}, {"emulate_precision_casts": True}])
def test_strict_numerics_change_a_layer_norm(options, compiler):
    """AMP0095."""
    norm, x = nn.LayerNorm(64, dtype=BF16), torch.randn(4096, 64).to(BF16)
    compiled = torch.compile(norm, options=options)(x)
    assert not torch.equal(compiled, norm(x))
    torch.testing.assert_close(compiled, norm(x), rtol=0.02, atol=0.02)  # a rounding


@pytest.mark.skipif(
    not hasattr(torch._inductor.config, "batch_invariant"), reason="new in torch 2.15"
)
def test_batch_invariant_changes_nothing_on_a_cpu_and_concerns_reductions(compiler):
    def normed(x, weight):
        return F.layer_norm(x, (64,)) @ weight

    x, weight = torch.randn(16, 64).to(BF16), torch.randn(64, 64).to(BF16)
    default = torch.compile(normed)(x, weight)
    torch.compiler.reset()
    invariant = torch.compile(normed, options={"batch_invariant": True})(x, weight)
    assert torch.equal(default, invariant)
    # The generators of reductions in Triton alone read it.
    folder = Path(torch.__file__).parent / "_inductor"
    readers = [
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*.py")
        if "batch_invariant" in file.read_text(encoding="utf-8")
    ]
    assert all("triton" in name or name in ("config.py", "runtime/hints.py") for name in readers)


def sloped(x):
    """NaN where the broken relu of the next test adds 1 to what it is given."""
    return (0.5 - x.relu()).sqrt().sum()


@pytest.fixture
def broken_relu(compiler):
    """A wrong kernel of relu in inductor, which has it for its own tests."""
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        yield


@pytest.mark.slow
def test_the_ladder_names_the_part_of_the_compiler(broken_relu, capsys):
    batch = torch.full((8,), -0.25)
    assert sloped(batch).isfinite()
    exec(code_of("NaN only with"), {"torch": torch, "loss_of": sloped, "batch": batch})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["True"] * 3 + ["False"] * 2
    assert "'inductor'" in lines[3]
    assert "'reduce-overhead'" in lines[4]


@pytest.mark.slow
def test_a_function_that_is_not_compiled_has_no_nan(broken_relu):
    """AMP0183."""
    batch, relu = torch.full((8,), -0.25), torch.compiler.disable(torch.relu)
    assert torch.compile(sloped)(batch).isnan()
    loss = torch.compile(lambda x: (0.5 - relu(x)).sqrt().sum())(batch)
    torch.testing.assert_close(loss, sloped(batch))


@pytest.mark.slow
def test_if_a_kernel_gives_nan_other_values_can_be_wrong_too(broken_relu):
    """AMP0183."""

    def two_results(x):
        return torch.stack([(0.5 - x.relu()).sqrt(), x.relu()]).nan_to_num(nan=0.5**0.5)

    batch = torch.full((8,), -0.25)
    result, expected = torch.compile(two_results)(batch), two_results(batch)
    torch.testing.assert_close(result[0], expected[0])
    assert (result[1] != expected[1]).all()


@pytest.mark.slow
def test_the_ladder_is_finite_for_a_sound_model(compiler, capsys):
    batch = torch.full((8,), -0.25)
    exec(code_of("NaN only with"), {"torch": torch, "loss_of": sloped, "batch": batch})
    assert capsys.readouterr().out.count("True") == 5


def bisected(function, inputs, capsys) -> str:
    names = {"torch": torch, "function": function, "inputs": inputs, "expected": function(*inputs)}
    exec(code_of("compiler step"), names)
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_the_bisector_names_roundings(compiler, capsys):
    if not hasattr(torch._inductor.config, "numerics"):
        pytest.skip("torch 2.11 does not emulate the casts on a CPU")
    assert "'inductor_emulate_precision_casts'" in bisected(rope, rope_inputs(), capsys)


@pytest.mark.slow
def test_the_bisector_names_a_wrong_op(broken_relu, capsys):
    line = bisected(sloped, [torch.full((8,), -0.25)], capsys)
    assert "subsystem='lowerings'" in line
    assert "relu" in line


MODELS = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())
"""


@pytest.mark.slow
def test_diff_compares_a_compiled_model_by_module(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(MODELS, encoding="utf-8")
    options = ["--input", "4,8", "--compile", "--precision", "bf16"]
    command = [sys.executable, "-m", "amp_lab", "diff", f"{file}:build", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search("modules? in both", done.stdout)
    assert "fp64" in done.stdout
    assert (
        "`--compile --precision bf16`"
        in SECTIONS["Why do compiled and eager outputs differ in bf16?"]
    )


# Attention


def heads(*size: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, *(size or (16, 32))).to(dtype) for _ in range(3))


def test_cudnn_stands_behind_plain_ops_by_default():
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    assert order[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    assert order.index(SDPBackend.MATH) < order.index(SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_profile_shows_the_kernel(backend, capsys):
    q, _, _ = heads()
    with sdpa_kernel(backend):
        exec(
            code_of("attention kernel ran"),
            {"torch": torch, "model": lambda x: F.scaled_dot_product_attention(x, x, x), "x": q},
        )
    printed = capsys.readouterr().out
    assert ("_scaled_dot_product_attention_math" in printed) == (backend is SDPBackend.MATH)
    assert ("flash_attention" in printed) == (backend is SDPBackend.FLASH_ATTENTION)


def test_the_table_names_ops_of_torch():
    names = re.findall(r"`(_scaled_dot_product_\w+)`", PAGE)
    assert len(names) == 4
    assert all(hasattr(torch.ops.aten, name) for name in names)


FIRST_ROW_HIDDEN = torch.ones(16, 16, dtype=torch.bool).tril()
FIRST_ROW_HIDDEN[0] = False


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_row_that_is_masked_everywhere(backend, dtype):
    q, _, v = heads(dtype=dtype)
    infinite = torch.zeros(16, 16, dtype=dtype).masked_fill(~FIRST_ROW_HIDDEN, -math.inf)
    least = infinite.masked_fill(~FIRST_ROW_HIDDEN, torch.finfo(dtype).min)
    with sdpa_kernel(backend):
        for mask in (FIRST_ROW_HIDDEN, infinite):
            output = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)
            assert output[..., 0, :].count_nonzero() == 0
            assert output.isfinite().all()
        output = F.scaled_dot_product_attention(q, q, v, attn_mask=least)
    average = v.float().mean(-2)
    torch.testing.assert_close(output[..., 0, :].float(), average, rtol=0.02, atol=0.02)
    by_hand = ((q @ q.mT).float() + infinite.float()).softmax(-1)
    assert by_hand[..., 0, :].isnan().all()


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_row_that_is_masked_by_the_least_number_of_fp16_ignores_the_mask(backend):
    q, _, v = heads(dtype=torch.float16)
    mask = torch.zeros(16, 16, dtype=torch.float16)
    mask = mask.masked_fill(~FIRST_ROW_HIDDEN, torch.finfo(torch.float16).min)
    with sdpa_kernel(backend):
        masked = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)
        without_mask = F.scaled_dot_product_attention(q, q, v)
    torch.testing.assert_close(masked[..., 0, :], without_mask[..., 0, :], rtol=0.02, atol=0.02)
    assert not torch.allclose(masked[..., 0, :].float(), v.float().mean(-2), atol=0.1)


def test_a_row_that_is_masked_everywhere_in_modules_and_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)
    hidden = torch.ones(1, 4, dtype=torch.bool)
    assert attention(x, x, x, key_padding_mask=hidden)[0].isnan().all()
    without = attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    assert without.isfinite().all()
    assert attention.eval()(x, x, x, key_padding_mask=hidden)[0].isnan().all()
    with torch.no_grad():
        assert attention(x, x, x, key_padding_mask=hidden)[0].isnan().all()
        without = attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    assert without.isnan().all()

    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i > 0), None, None, 16, 16, "cpu")
    q, _, v = heads(dtype=torch.float32)
    assert flex_attention(q, q, v, block_mask=mask)[..., 0, :].count_nonzero() == 0


def test_a_nan_in_a_masked_value_reaches_the_output():
    q, _, v = heads(4, 8, dtype=torch.float32)
    v[..., 3, :] = math.nan
    mask = torch.tensor([True, True, True, False]).expand(4, 4)
    assert F.scaled_dot_product_attention(q, q, v, attn_mask=mask).isnan().all()
    v[..., 3, :] = 0
    assert F.scaled_dot_product_attention(q, q, v, attn_mask=mask).isfinite().all()


def plain_attention(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def test_sdpa_is_nearer_to_the_exact_result_than_plain_ops():
    """AMP0255."""
    q, k, v = (torch.randn(1, 4, 64, 32).to(BF16) for _ in range(3))
    exact = plain_attention(q.double(), k.double(), v.double())
    assert error_of(plain_attention(q.float(), k.float(), v.float()), exact) < 1e-6
    assert error_of(plain_attention(q, k, v), exact) == pytest.approx(5e-3, abs=1e-3)
    assert error_of(F.scaled_dot_product_attention(q, k, v), exact) == pytest.approx(2e-3, abs=5e-4)


def test_sdpa_stays_finite_where_scores_exceed_fp16():
    q = torch.full((1, 1, 8, 64), 40.0, dtype=torch.float16)
    assert (q @ q.mT).isinf().all()
    assert F.scaled_dot_product_attention(q, q, q).isfinite().all()


@pytest.mark.slow
def test_autocast_casts_for_flex_attention(compiler):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = heads(dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        for attend in (flex_attention, torch.compile(flex_attention)):
            assert attend(q, k, v).dtype is BF16
            assert attend(q, k, v.to(BF16)).dtype is BF16


def test_a_norm_gives_fp32_queries_which_the_cast_repairs():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

        def forward(self, x):
            v = self.project(x)
            q, k = self.norm(v), self.norm(v)
            dtypes.append(q.dtype)
            q, k = q.to(v.dtype), k.to(v.dtype)
            dtypes.extend((q.dtype, k.dtype, v.dtype))
            return q + k + v

    dtypes: list[torch.dtype] = []
    xray(Normed(), torch.randn(2, 8), device_type="cuda", dtype=BF16)
    assert set(dtypes[1:]) == {BF16}
    assert (dtypes[0] is torch.float32) == norm_has_a_rule()
    code = "`q, k = q.to(v.dtype), k.to(v.dtype)`"
    assert code in SECTIONS["Does autocast cast for flex_attention and flash-attn?"]


# Norms, ops of your own, vmap


def norm_has_a_rule() -> bool:
    """Whether CUDA's autocast has a rule for rms_norm, as it has from torch 2.12 on."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def norm_row(norm: nn.Module):
    model = nn.Sequential(nn.Linear(16, 64), norm, nn.Linear(64, 8))
    found = xray(model, torch.randn(4, 16), device_type="cuda", dtype=BF16)
    (row,) = (row for row in found.rows if row.op == "rms_norm")
    return row


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_the_rule_for_rms_norm_and_a_norm_that_is_exempt():
    """AMP0251."""
    names = {"torch": torch, "F": F}
    exec(code_of("RMSNorm"), names)
    exempt = names["SameDtypeRMSNorm"]
    assert norm_row(nn.RMSNorm(64)).dtype is (torch.float32 if norm_has_a_rule() else BF16)
    row = norm_row(exempt(64))
    assert (row.dtype, *row.in_dtypes) == (BF16, BF16, BF16)

    norm, x = exempt(64), torch.randn(4, 64).to(BF16)
    in_fp32 = F.rms_norm(x.float(), (64,)).to(BF16)
    assert torch.equal(norm(x), in_fp32)
    norm(x).sum().backward()
    assert norm.weight.grad.dtype is torch.float32


@pytest.mark.usefixtures("each_warning")
def test_a_weight_in_fp32_leaves_the_fused_norm():
    """AMP0251."""
    x = torch.randn(4, 64).to(BF16)
    with pytest.warns(UserWarning, match="Mismatch dtype between input and weight"):
        torch.nn.functional.rms_norm(x, (64,), torch.ones(64))


def test_an_op_of_your_own_gets_the_registered_dtype():
    code = code_of("my own op")
    op, registration = code.split("\n\n")
    names = {"torch": torch}
    exec(op.replace("mine::", "answers::"), names)
    double, x = names["double"], torch.randn(3)
    with torch.autocast("cpu", dtype=BF16):
        assert double(x).dtype is torch.float32
    exec(registration.replace("mine::", "answers::").replace('"cuda"', '"cpu"'), names)
    for dtype in (BF16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert double(x).dtype is BF16
    assert double(x).dtype is torch.float32


def test_vmap_adds_the_bias_in_fp32():
    """AMP0253."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    unbiased = nn.Linear(8, 8, bias=False)
    with torch.autocast("cpu", dtype=BF16):
        assert layer(x).dtype is BF16
        mapped = torch.vmap(layer)(x)
        assert mapped.dtype is torch.float32
        assert torch.vmap(unbiased)(x).dtype is BF16
    product = x.to(BF16) @ layer.weight.to(BF16).T
    torch.testing.assert_close(mapped, product.float() + layer.bias, rtol=0.01, atol=0.01)
    exact = F.linear(*(values.detach().double() for values in (x, layer.weight, layer.bias)))
    with torch.autocast("cpu", dtype=BF16):
        assert error_of(mapped.detach(), exact) < 1.5 * error_of(layer(x).detach(), exact)
    assert "`torch.vmap(layer)(x).to(torch.bfloat16)`" in PAGE


# CUDA graphs, and the cache of compiled code


def test_the_scale_changes_in_place():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler.scale(weight.sum()).backward()
    before = scaler._scale
    weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale is before
    assert before.item() == 4.0


def test_a_gradient_stays_in_the_zeros_that_it_was_given():
    """AMP0250: this tensor is no buffer of a CUDA graph."""
    for mode in ("reduce-overhead", "max-autotune"):
        assert torch._inductor.list_mode_options(mode)["triton.cudagraphs"]
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    zeros = weight.grad = torch.zeros(2)
    for _ in range(2):
        (2 * weight).sum().backward()
        (2 * weight).sum().backward()
        assert weight.grad is zeros
        assert zeros.tolist() == [4, 4]
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    assert weight.grad is None


class ReadsOfValues(TorchDispatchMode):
    """Counts the ops that bring a value to Python, for which a GPU has to wait."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_reads_a_value_unless_the_optimizer_is_fused(fused):
    """AMP0252."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], fused=fused)
    scaler.scale(weight.sum()).backward()
    with ReadsOfValues() as reads:
        scaler.step(optimizer)
    assert (reads.count == 0) == fused


PROGRAM = """
import torch
from torch._dynamo.utils import counters

layer = torch.nn.Linear(8, 8)
for dtype, options in [
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.bfloat16, {"emulate_precision_casts": True}),
]:
    def forward(x):
        with torch.autocast("cpu", dtype=dtype):
            return layer(x)

    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(forward, options=options)(torch.randn(4, 8))
    print("hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss")
"""


@pytest.mark.slow
def test_a_second_process_takes_the_kernels_of_the_first(tmp_path):
    """AMP0254: each dtype of autocast, and each setting of the compiler, has kernels of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    printed = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        printed.append(done.stdout.split())
    assert printed == [["miss"] * 3, ["hit"] * 3]
