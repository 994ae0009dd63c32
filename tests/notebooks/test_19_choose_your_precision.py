"""What notebook 19 says of fp32's modes, and its table, held against other libraries."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

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
    heading = "# | setting | weights | products | gradients | state | outputs |"
    lines = SOURCE.read_text().partition(heading)[2].splitlines()[2:]
    rows = [line for line, _ in zip(lines, found, strict=False)]
    stated = {}
    for line in rows:
        name, *cells = (cell.strip() for cell in line.strip("# |").split(" | "))
        stated[re.sub("`", "", name)] = cells
    assert stated == found


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
