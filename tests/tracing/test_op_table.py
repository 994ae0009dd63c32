"""op_table, held against the dispatcher, torch's header, torch's documentation, and real calls."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from amp_lab.core.backends import BACKENDS
from amp_lab.core.cpu import lstm_error
from amp_lab.core.errors import AmpLabWarning, DeviceError
from amp_lab.core.report import dtype_name, short_name
from amp_lab.tracing.op_table import POLICIES, OpRule, OpTable, differences, op_table, policies

pytestmark = pytest.mark.slow

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

# Lists of the CUDA section of torch's documentation (docs/source/amp.rst, "Autocast Op Reference").
DOCUMENTED = {
    "lower_precision": """
        __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d
        conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d GRUCell linear
        LSTMCell matmul mm mv prelu RNNCell""",
    "fp32": """
        __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits
        cosh cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum
        dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm
        log log_softmax log10 log1p log2 margin_ranking_loss mse_loss
        multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist
        poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
        softmax softmin softplus sum renorm tan triplet_margin_loss""",
    "promote": """
        addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add
        tensordot""",
    "banned": "binary_cross_entropy",
}

# The documentation names what people write; the dispatcher knows what that is made of.
MADE_OF = {
    "__matmul__": ["matmul"],
    "multi_dot": ["linalg_multi_dot"],
    "GRUCell": ["gru_cell"],
    "LSTMCell": ["lstm_cell"],
    "RNNCell": ["rnn_tanh_cell", "rnn_relu_cell"],
    "__pow__": ["pow"],
    "__rpow__": ["pow"],
    "__rdiv__": ["reciprocal"],  # Tensor.__rdiv__ is self.reciprocal() * other
    "__rtruediv__": ["reciprocal"],
    "cross_entropy": ["log_softmax", "nll_loss"],
    "normalize": ["linalg_vector_norm"],  # which is what Tensor.norm calls
    "softmin": ["softmax"],
    "grid_sample": ["grid_sampler"],
}

# What autocast knows on CUDA and the documentation does not list, and why.
UNDOCUMENTED = {
    "the ops below documented functions": """_convolution convolution conv_tbc cudnn_convolution
        cudnn_convolution_transpose _cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell
        native_layer_norm nll_loss2d frobenius_norm nuclear_norm linalg_matrix_norm
        linalg_vector_norm""",
    "added since the lists were written": """einsum linalg_vecdot scaled_dot_product_attention
        _scaled_dot_product_flash_attention rms_norm huber_loss logsumexp vdot linalg_matrix_sqrth
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""",
}

# What cannot be called without the device: it belongs to a library of the device.
NEEDS_DEVICE = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"} | {
    "_mps_convolution"
}
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_thnn_fused_gru_cell", "Meta"):
    # Torch 2.11 cannot run these on fake tensors either.
    NEEDS_DEVICE |= {"_convolution"} | {
        "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell"
    }  # fmt: skip


def not_called(device_type):
    """The ops that cannot be called on this machine, besides those that autocast refuses."""
    if device_type != "cpu":
        return NEEDS_DEVICE
    has_lstm = lstm_error(torch.get_autocast_dtype("cpu"), with_gradients=False) is None
    return set() if has_lstm else {"mkldnn_rnn_layer"}


@pytest.fixture(scope="module")
def tables():
    return {device_type: op_table(device_type) for device_type in BACKENDS}


def by_name(table):
    return {rule.op: rule for rule in table}


def registered(device_type):
    key = f"Autocast{device_type.upper()}"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def here(device_type):
    return device_type == "cpu" or torch.get_device_module(device_type).is_available()


def state():
    return (
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in BACKENDS],
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.cudnn.enabled,
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("device_type", BACKENDS)
def test_every_registered_overload_is_in_one_rule(tables, device_type):
    table = tables[device_type]
    found = [
        f"{rule.op.partition('.')[0]}.{overload}".removesuffix(".default")
        for rule in table
        for overload in rule.overloads
    ]
    assert sorted(found) == sorted(registered(device_type))
    assert len(table) == len(by_name(table)) > 80
    assert {rule.policy for rule in table} <= set(POLICIES)
    assert isinstance(table, list)
    assert all(isinstance(rule, OpRule) for rule in table)


@pytest.mark.parametrize("device_type", BACKENDS)
def test_every_call_returned_what_its_policy_says(tables, device_type):
    low = torch.get_autocast_dtype(device_type)
    for rule in tables[device_type]:
        if rule.observed is None:
            assert rule.policy == "banned" or rule.op in not_called(device_type), rule
            assert rule.reason
            assert "\n" not in rule.reason
            assert "CUDA error" not in rule.reason
            continue
        assert not rule.reason
        if not (rule.observed.is_floating_point or rule.observed.is_complex):
            assert (rule.op, rule.observed) == ("linalg_matrix_rank", torch.int64)
            continue
        # The inputs were such that the policy had something to change.
        if rule.policy == "lower_precision":
            assert set(rule.given) == {torch.float32}, rule
            assert rule.observed is low, rule
        else:
            mixed = {torch.float32, low} if rule.policy == "promote" else {low}
            assert set(rule.given) == mixed, rule
            assert rule.observed in (torch.float32, torch.complex64), rule
        assert rule.agrees


def test_only_what_needs_the_device_was_not_called(tables):
    for device_type in BACKENDS:
        missing = {rule.op for rule in tables[device_type] if rule.observed is None}
        banned = {rule.op for rule in tables[device_type] if rule.policy == "banned"}
        assert missing <= banned | not_called(device_type)
        assert banned <= {"binary_cross_entropy"}
        assert tables[device_type].real == here(device_type)


def test_cuda_agrees_with_the_header():
    text = HEADER.read_text()
    rules = {
        (rule.op.partition(".")[0], overload): rule.policy
        for rule in op_table("cuda")
        for overload in rule.overloads
    }
    listed = {}
    for macro, policy in {
        "LOWER_PRECISION_FP": "lower_precision",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "fp32_set_opt_dtype",
        "PROMOTE": "promote",
    }.items():
        (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", text)
        for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
            listed[op, overload or "default"] = policy
    assert len(listed) > 100
    # These two get a dtype appended, which the table counts as setting the optional one.
    (body,) = re.findall(r"AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)((?:.*\\\n)*)", text)
    appended = {tuple(n.split(".")): "fp32_set_opt_dtype" for n in re.findall(r'"([\w.]+)"', body)}
    assert len(appended) >= 2
    header = listed | appended
    assert {key: rules.get(key) for key in header} == header
    # In no list: cuDNN's own, an op in the CPU's list too, and the banned one.
    others = {op for op, overload in set(rules) - set(header)}
    assert others <= NEEDS_DEVICE | {"binary_cross_entropy", "linalg_matrix_sqrth"}


def test_cuda_agrees_with_the_documentation(tables):
    rules, explained = by_name(tables["cuda"]), set()
    for policy, names in DOCUMENTED.items():
        # The documentation does not tell apart the two ways of getting to float32.
        same = {"fp32", "fp32_set_opt_dtype"} if policy == "fp32" else {policy}
        for name in names.split():
            for op in MADE_OF.get(name, [name]):
                assert rules[op].policy in same, (name, op)
                explained.add(op)
    for ops in UNDOCUMENTED.values():
        explained |= set(ops.split())
    assert set(rules) - explained == set()


def test_cpu_agrees_with_real_autocast(tables):
    rules = by_name(tables["cpu"])
    low, full = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)
    calls = {
        "mm": lambda: full @ full,
        "linear": lambda: F.linear(full, full),
        "mse_loss": lambda: F.mse_loss(low, low),
        "prod": lambda: low.prod(),
        "linalg_inv": lambda: torch.linalg.inv(low + torch.eye(4)),
        "cat": lambda: torch.cat([low, full]),
        "stack": lambda: torch.stack([low, full]),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            full[None], full[None], full[None]
        ),
    }
    with torch.autocast("cpu"):
        assert {op: call().dtype for op, call in calls.items()} == {
            op: rules[op].observed for op in calls
        }
        # What is in no table runs in the dtype of its inputs.
        assert not {"softmax", "exp", "layer_norm", "sum"} & set(rules)
        assert low.softmax(0).dtype is low.exp().dtype is low.sum().dtype is torch.bfloat16


@pytest.mark.parametrize("device_type", BACKENDS)
def test_dtype_changes_what_is_low_and_no_policy(tables, device_type):
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
    dtype = other[torch.get_autocast_dtype(device_type)]
    table = op_table(device_type, dtype)
    assert table.dtype is dtype
    assert [(r.op, r.policy) for r in table] == [(r.op, r.policy) for r in tables[device_type]]
    # cuDNN's recurrent networks are cast to float16 whatever is asked for.
    assert {r.op for r in table if r.agrees is False} <= {"_cudnn_rnn"}
    low = {r.observed for r in table if r.policy == "lower_precision" and r.agrees}
    assert low == {dtype}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_policies_of_one_op_are_those_of_the_table(tables, device_type):
    for op in ("addmm", "softmax", "exp", "cat", "mse_loss", "sum", "binary_cross_entropy", "mul"):
        rules = [r for r in tables[device_type] if r.op.partition(".")[0] == op]
        assert policies(op, device_type, torch.float16) == {rule.policy for rule in rules}


def test_differences_between_backends(tables):
    cuda, mps, cpu = (tables[name] for name in ("cuda", "mps", "cpu"))
    assert not differences(cuda, cuda)
    found = {row.op: (row.first, row.second) for row in differences(cuda, mps)}
    back = {row.op: (row.second, row.first) for row in differences(mps, cuda)}
    assert found == back
    assert found["vdot"] == ("promote", None)
    assert found["binary_cross_entropy"] == ("banned", None)
    assert "layer_norm" not in found
    found = {row.op: (row.first, row.second) for row in differences(cuda, cpu)}
    assert found["softmax.int"] == ("fp32_set_opt_dtype", None)
    assert found["layer_norm"] == ("fp32", None)
    assert found["cat"] == (None, "promote")
    assert found["binary_cross_entropy"] == ("banned", "fp32")
    assert found["conv1d.padding"] == (None, "lower_precision")
    assert not {"mm", "linear", "conv2d", "matmul"} & set(found)
    # XPU follows CUDA's lists but for what belongs to CUDA's libraries.
    ours = {row.op for row in differences(cuda, tables["xpu"])}
    assert ours <= NEEDS_DEVICE | {"linalg_matrix_sqrth"}


@pytest.mark.parametrize(
    ("policy", "kernel"),
    [
        ("lower_precision", lambda x, y: (x.to(torch.bfloat16), y.to(torch.bfloat16))),
        ("fp32", lambda x, y: (x.float(), y.float())),
        ("promote", lambda x, y: (x.to(p := torch.promote_types(x.dtype, y.dtype)), y.to(p))),
    ],
)
def test_table_follows_when_torch_gets_a_rule(policy, kernel):
    def autocast_kernel(x, y):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet("AutocastCPU")):
            return torch.ops.aten.logaddexp(*kernel(x, y))

    assert "logaddexp" not in by_name(op_table("cpu"))
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("logaddexp", autocast_kernel, "AutocastCPU")
        rule = by_name(op_table("cpu"))["logaddexp"]
    finally:
        library._destroy()
    assert rule.policy == policy
    assert rule.observed is (torch.bfloat16 if policy == "lower_precision" else torch.float32)
    assert rule.agrees
    assert "logaddexp" not in by_name(op_table("cpu"))


def test_op_that_follows_no_policy_is_told_and_left_out():
    def autocast_kernel(x):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet("AutocastCPU")):
            return torch.ops.aten.sin(x)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("sin", autocast_kernel, "AutocastCPU")
        with pytest.warns(AmpLabWarning, match=r"aten::sin .*'cpu' .*no dtype"):
            table = op_table("cpu")
    finally:
        library._destroy()
    assert "sin" not in by_name(table)
    assert len(table) > 80


@pytest.mark.parametrize("device_type", BACKENDS)
def test_nothing_is_left_or_printed(device_type, capfd):
    before = state()
    op_table(device_type)
    assert state() == before
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False), torch.inference_mode():
        inside = state()
        table = op_table(device_type)
        assert state() == inside
    assert [rule.policy for rule in table] == [rule.policy for rule in op_table(device_type)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("device_type", ["gpu", "rocm", "", "cuda:0", None])
def test_unknown_device_is_refused_in_a_line(device_type):
    with pytest.raises(DeviceError, match="give 'cuda'") as told:
        op_table(device_type)
    assert repr(device_type) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, "bf16"])
def test_dtype_that_autocast_does_not_take_is_refused(dtype):
    before = state()
    for device_type in BACKENDS:
        with pytest.raises(DeviceError, match="does not support") as told:
            op_table(device_type, dtype)
        assert "\n" not in str(told.value)
    assert state() == before


@pytest.mark.parametrize("device_type", BACKENDS)
def test_table_is_printed_with_every_op(tables, device_type):
    table = tables[device_type]
    text, markdown, page = str(table), table.to_markdown(), table._repr_html_()
    for rule in table:
        observed = "-" if rule.observed is None else short_name(rule.observed)
        (line,) = re.findall(rf"^{rule.policy} +{re.escape(rule.op)} .*$", text, re.MULTILINE)
        assert observed in line.split()
        assert f"| {rule.policy} | {rule.op} | " in markdown
        assert f"<td>{rule.op}</td>" in page
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == len(table) + 2
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert f"{len(table)} ops" in text
    assert all(policy in text for policy in POLICIES)
    loaded = json.loads(table.to_json())
    assert loaded["device_type"] == device_type
    assert [(r["op"], r["policy"]) for r in loaded["ops"]] == [(r.op, r.policy) for r in table]
    for row, rule in zip(loaded["ops"], table, strict=True):
        assert row["observed"] == (rule.observed and dtype_name(rule.observed))
        assert (row["reason"], row["agrees"]) == (rule.reason, rule.agrees)


def test_differences_are_printed(tables):
    found = differences(tables["cuda"], tables["mps"])
    text, markdown, page = str(found), found.to_markdown(), found._repr_html_()
    assert text.startswith(f"Autocast treats {len(found)} ops differently")
    assert re.search(r"^vdot +promote +-$", text, re.MULTILINE)
    assert "| vdot | promote | - |" in markdown
    assert "<td>vdot</td><td>promote</td><td>-</td>" in page
    loaded = json.loads(found.to_json())
    assert loaded["device_types"] == ["cuda", "mps"]
    assert {"op": "vdot", "policies": ["promote", None]} in loaded["ops"]
    assert len(loaded["ops"]) == len(found)


def test_reasons_cannot_break_a_table():
    rule = OpRule("x", ("default",), "banned", (), None, "a | b <c>", None)
    table = OpTable([rule], "cpu", torch.bfloat16, real=True)
    assert r"a \| b <c> |" in table.to_markdown()
    assert "a | b &lt;c&gt;" in table._repr_html_()
