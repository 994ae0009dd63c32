"""The step in tiles for a GPU, without one: its values in Triton's interpreter, its code for GPUs.

The interpreter multiplies no bf16, so that values are those of float32 and float16: the kernels
compute in whatever their matrices have.
"""

import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import some_of
from torch import nn

from amp_lab.bench import rungs
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.tiled_convmodel import TiledStep, tiled_unsupported_reason
from amp_lab.bench.workloads import convmodel_workload
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision

triton = pytest.importorskip("triton")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
ASTSource = triton.compiler.ASTSource

SIZES = [(32, 16), (128, 24), (256, 16)]  # hidden channels, and edge: up to two blocks of weights


def offs() -> list[list[float]]:
    """For each size and dtype, how far loss and gradients are from autograd's in float32."""
    from amp_lab.bench.triton_tiles import TritonTiles

    found = []
    for hidden, size in SIZES:
        torch.manual_seed(0)
        model = ConvModel(hidden)
        for norm in list(model)[1::3]:
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
        exact, (inputs, target) = copy.deepcopy(model), quantized_sine(size)
        loss = F.mse_loss(exact(inputs), target)
        loss.backward()
        named = dict(exact.named_parameters())
        for dtype in (torch.float32, torch.float16):
            mine = TiledStep(model, dtype, tiles=TritonTiles)(inputs, target)
            off = [abs(mine - loss) / loss]
            for name, parameter in model.named_parameters():
                if name not in {"0.bias", "3.bias", "6.bias"}:  # exact zeros, and rounding errors
                    grad = named[name].grad
                    off.append((parameter.grad - grad).norm() / grad.norm())
            found.append([float(number) for number in off])
    return found


# Triton takes its functions for the interpreter's when they are defined: hence a process.
@pytest.mark.weekly
def test_the_kernels_have_the_gradients_of_autograd():
    code = "import json, test_triton_tiles as t; print(json.dumps(t.offs()))"
    path = os.pathsep.join(filter(None, [os.path.dirname(__file__), *sys.path]))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(SIZES)
    for exact, half in zip(found[::2], found[1::2], strict=True):
        assert len(exact) == 12  # the loss, and the gradients
        assert max(exact) < 1e-5
        assert 1e-5 < max(half) < 4e-2  # it rounds to 2^-11 and sums what cancels


KERNELS = [("_layer", True), ("_layer", False), ("_head", False), ("_input_grad", True)]
KERNELS += [("_input_grad", False), ("_weight_grad", True), ("_weight_grad", False)]
# Of each its instruction for products, and the shared memory of a block in KiB.
ARCHITECTURES = {
    "sm_80": ("mma.sync", 163),
    "sm_90": ("wgmma", 227),
    "gfx942": ("mfma", 64),
}


def built(name: str, first: bool, architecture: str):
    """A kernel for 256 channels in bf16, as code for a GPU that is not here."""
    from amp_lab.bench import triton_tiles

    kernel = getattr(triton_tiles, name)
    below, above = ("*fp32", "*bf16") if first else ("*bf16", "*fp32")
    types = {"below": below, "inputs": (above, "*bf16", "*fp32", below, "*fp32")}
    types |= dict.fromkeys(("z", "weight", "out"), "*bf16")
    types |= dict.fromkeys(("pixels", "tiles"), "i32")
    constants = {"C": 256, "FIRST": first, "BLOCK": 128}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {key: types.get(key, "*fp32") for key in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = []  # to 16 bytes, as torch's memory is
    for i, kind in enumerate(signature.values()):
        if kind != "constexpr":
            aligned += [(i, j) for j in range(5)] if isinstance(kind, tuple) else [(i,)]
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    if architecture.startswith("sm_"):
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", architecture, 64)
    return triton.compile(source, target=target, options=dict(triton_tiles.OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", some_of("sm_90", "gfx942", "sm_80"))
def test_the_kernels_are_code_for_a_gpu(architecture, tmp_path):
    instruction, shared = ARCHITECTURES[architecture]
    for name, first in KERNELS:
        kernel = built(name, first, architecture)
        assert kernel.metadata.shared <= 1024 * shared, name
        text = kernel.asm["ptx" if architecture.startswith("sm_") else "amdgcn"]
        assert (instruction in text) == (name != "_head"), name  # which has no product
        if architecture.startswith("sm_"):
            code = tmp_path / "kernel.cubin"
            code.write_bytes(kernel.kernel)
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            run = subprocess.run([tool, "-res-usage", code], capture_output=True, text=True)
            registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", run.stdout)[-1]
            assert 0 < int(registers) <= 255, run.stdout
            assert stack == "0", f"{name}: registers for everything, but {run.stdout}"


def test_sizes_that_do_not_fit_are_refused():
    from amp_lab.bench.triton_tiles import TritonTiles

    for pixels, channels in ((100, 64), (128, 96), (128, 16), (2**23, 256)):
        with pytest.raises(OptionError) as refused:
            TritonTiles(pixels, channels, torch.device("cpu"))
        assert str(refused.value) == (
            f"{pixels} pixels of {channels} channels: on a GPU, the tiled step needs a multiple of "
            "64 pixels, a power of two of at least 32 channels, and fewer than 2^31 values"
        )


def test_the_rung_is_there_where_triton_is():
    for kind, name in (("cuda", "tiles"), ("xpu", "tiles"), ("mps", "by-hand")):
        ladder = rungs.Ladder(convmodel_workload(8), Precision.BF16, torch.device(kind))
        assert rungs.rungs_of(ladder)[-1].name == name


def test_without_triton_tiles_say_so(monkeypatch):
    assert tiled_unsupported_reason("cuda") is None
    assert "not available for mps" in tiled_unsupported_reason("mps")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not available for cuda" in tiled_unsupported_reason("cuda")


def test_what_triton_cannot_compile_is_said_in_a_line(monkeypatch):
    from amp_lab.bench import triton_tiles

    class Kernel:
        def __getitem__(self, grid):
            raise triton.TritonError("no such instruction\nand more")

    monkeypatch.setattr(triton_tiles, "_layer", Kernel())
    tiles = triton_tiles.TritonTiles(64, 32, torch.device("cpu"))
    with pytest.raises(OptionError, match="for cpu: TritonError: no such"):
        tiles.run("forward2")
