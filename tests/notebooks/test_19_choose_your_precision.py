"""What notebook 19 says of fp32's modes, and its table, held against other libraries."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "notebooks" / "19_choose_your_precision.py"
NEEDED = ("accelerate", "keras", "lightning", "lightning_fabric", "transformers")


@pytest.mark.weekly
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
)
def test_every_cell_of_the_table_is_what_a_hook_sees():
    program = ROOT / "tests" / "support" / "framework_dtypes.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    heading = "# | setting | weights | matmuls | outputs |"
    lines = SOURCE.read_text().partition(heading)[2].splitlines()[2:]
    rows = [line for line, _ in zip(lines, found, strict=False)]
    stated = {}
    for line in rows:
        name, *cells = (cell.strip() for cell in line.strip("# |").split(" | "))
        stated[re.sub("`", "", name)] = cells
    assert all(weights == gradients == state for weights, _, gradients, state, _ in found.values())
    assert stated == {name: [row[0], row[1], row[4]] for name, row in found.items()}


def test_a_power_of_two_can_be_moved_through_relu_and_not_through_gelu():
    x = torch.rand(16, 32, generator=torch.Generator().manual_seed(0))
    for between, is_exact in ((torch.nn.ReLU(), True), (torch.nn.GELU(), False)):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), between, torch.nn.Linear(64, 8))
        with torch.inference_mode():
            wanted = model(x)
            for tensor, factor in (
                (model[0].weight, 18),
                (model[0].bias, 18),
                (model[2].weight, -18),
            ):
                tensor.mul_(2.0**factor)
            assert torch.equal(model(x), wanted) == is_exact


def test_layers_in_fp32_keep_the_values_that_overflow_in_fp16():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
    last, x = torch.nn.Linear(8, 4).half(), torch.rand(16, 32)
    wide = torch.nn.Sequential(*layers)
    with torch.inference_mode():
        wide[0].weight.mul_(2.0**18)
        wide[2].weight.mul_(2.0**-18)
        assert wide(x).isfinite().all()
        assert last(wide(x.half().float()).half()).isfinite().all()
        assert not wide.half()(x.half()).isfinite().all()


def test_turing_says_that_it_supports_bf16_unless_asked_without_emulation():
    properties = mock.Mock(major=7, minor=5)  # of a Turing GPU
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda._check_bf16_tensor_supported", return_value=True),
        mock.patch("torch.version.hip", None),
    ):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        assert not torch.cuda.is_tf32_supported()


def test_a_step_with_a_scaler_needs_float64():
    """As the table says of Arc A."""
    assert ".double().reciprocal()" in inspect.getsource(torch.amp.GradScaler.unscale_)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Fabric's, of 16-mixed on a CPU
def test_on_a_cpu_two_settings_differ_from_their_name():
    accelerate = pytest.importorskip("accelerate")
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", precision="16-mixed")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    for prepare, wanted in ((fabric.setup, torch.bfloat16), (accelerator.prepare, torch.float32)):
        layer, seen = torch.nn.Linear(2, 2), []
        layer.register_forward_hook(lambda module, x, y, seen=seen: seen.append(y.dtype))
        prepare(layer)(torch.ones(1, 2))
        assert seen == [wanted]
    accelerate.state.AcceleratorState._reset_state(True)


def test_an_old_name_is_refused_only_where_it_would_contradict_the_new_one():
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    try:
        matmul.fp32_precision = "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_tf32
        matmul.fp32_precision = "tf32"
        for read_old in (torch.get_float32_matmul_precision, lambda: matmul.allow_tf32):
            with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
                read_old()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_old_settings_alone_can_always_be_read():
    backends, before = torch.backends, torch.backends.cudnn.allow_tf32
    try:
        for name, is_tf32, cpu in (
            ("highest", False, "ieee"),
            ("high", True, "tf32"),
            ("medium", True, "bf16"),
        ):
            for convolutions in (True, False):
                torch.set_float32_matmul_precision(name)
                backends.cudnn.allow_tf32 = convolutions
                assert torch.get_float32_matmul_precision() == name
                assert backends.cuda.matmul.allow_tf32 == is_tf32
                assert backends.mkldnn.matmul.fp32_precision == cpu
                assert backends.cudnn.allow_tf32 == convolutions
    finally:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = before


@pytest.mark.slow
def test_transformers_loads_a_model_in_the_dtype_that_it_was_saved_in(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = transformers.LlamaConfig(vocab_size=32, intermediate_size=16, **sizes)
    transformers.LlamaForCausalLM(settings).bfloat16().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).dtype is torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype is torch.float32


@pytest.mark.weekly
@pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="needs keras")
def test_a_saved_keras_model_keeps_its_policy(tmp_path):
    program = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras
keras.config.set_dtype_policy("mixed_bfloat16")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.save(sys.argv[1])
keras.config.set_dtype_policy("float32")
print(keras.saving.load_model(sys.argv[1]).layers[0].dtype_policy.name)
"""
    command = [sys.executable, "-c", program, tmp_path / "net.keras"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "mixed_bfloat16"


@pytest.mark.slow
def test_accelerate_keeps_16_bits_out_of_its_wrapper_and_inside_its_block():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    wrapped = accelerator.prepare(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert wrapped(x).dtype is torch.float32
    model = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    with accelerator.autocast():
        assert model(x).dtype is torch.bfloat16
    accelerate.state.AcceleratorState._reset_state(True)


def test_t5_keeps_one_layer_of_each_block_in_fp32(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=8
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    load = transformers.T5ForConditionalGeneration.from_pretrained
    dtypes = {name: p.dtype for name, p in load(tmp_path, dtype=torch.float16).named_parameters()}
    wide = [name for name, dtype in dtypes.items() if dtype is torch.float32]
    assert wide
    assert all(name.endswith("wo.weight") for name in wide)
