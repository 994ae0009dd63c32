"""The package on the pretend accelerator; and faults that it must find, planted one by one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import some_of
from pretend_build import library

import build_pairs
import first_gpu_parts
from conftest import WEEKLY

HERE = Path(__file__).resolve().parent
SRC = build_pairs.FOLDER.parent / "src"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None or sys.platform != "linux", reason="it takes g++, on Linux"
    ),
]


def run(
    code: str, package: Path = SRC, timeout_s: float = 300, **settings: str
) -> subprocess.CompletedProcess:
    """Run code in a Python that has the device, with the package in that folder."""
    folders = (
        package,
        build_pairs.FOLDER,
        build_pairs.FOLDER.parent / "tools",
        HERE,
        HERE / "startup",
    )
    chosen = {
        "AMP_LAB_DEVICE": "pretend",
        "AMP_LAB_SCALE": "quick",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PRETEND_LIBRARY": str(library()),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | chosen | settings,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def passes(code: str, package: Path = SRC, **settings: str) -> bool:
    done = run(code, package, **settings)
    return done.returncode == 0


DEVICE = """
import torch
from amp_lab import describe_device, measure, pick_device, recommend_precision
device = pick_device()
assert device.type == "pretend", device
report = describe_device(device)
assert "Pretend" in report.name
"""

TIMING = """
import torch
from amp_lab import measure
x = torch.ones(2**20, device="pretend")  # 4 MiB read and written: 40 ms at 200 MB/s
found = measure(lambda: x.add_(1), device="pretend", warmup=1, repeats=3)
assert 0.02 < found.median_s < 0.2, found
assert found.peak_bytes >= 2**22
"""

AUTOCAST = """
import torch
from amp_lab import Precision
model = torch.nn.Linear(8, 8).to("pretend")
with Precision("fp16").autocast("pretend"):
    assert model(torch.ones(2, 8, device="pretend")).dtype is torch.float16
assert Precision("fp16").grad_scaler("pretend").scale(torch.ones((), device="pretend")) == 2**16
"""

BATCHES = """
import torch
from amp_lab import load_dataset
from amp_lab.train.data import batches
images = load_dataset("digits", "data").train
pinned, to = [], torch.Tensor.to
torch.Tensor.to = lambda x, *where, **how: pinned.append(x.is_pinned()) or to(x, *where, **how)
one, _ = next(iter(batches(images, 64, device=torch.device("pretend"))))
torch.Tensor.to = to
assert pinned == [True, True]
assert one.device.type == "pretend"
assert torch.equal(one.cpu(), next(iter(batches(images, 64)))[0])
"""

TRAINING = """
import torch
from amp_lab import fit
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).to("pretend")
data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
dtypes = set()
model.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
found = fit(
    model,
    lambda epoch, batch: data[batch:],
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    precision="fp16",
    device="pretend",
    epochs=2,
    test_batches=lambda: data,
)
assert found[-1].train_loss < found[0].train_loss
assert dtypes == {torch.float16}, dtypes
"""

XRAY = """
import torch
from amp_lab import xray
found = xray(torch.nn.Linear(8, 8), torch.ones(2, 8), device_type="cuda")
assert "fp16" in str(found)
"""

T4 = """
import torch
from amp_lab import Precision, describe_device, measure, pick_device, recommend_precision
from amp_lab.core.gpus import gpu_of

device = pick_device()
gpu = gpu_of("t4")
report = describe_device(device)
assert gpu_of(report.name) is gpu
assert report.memory_bytes == gpu.memory_bytes
assert torch.pretend.is_bf16_supported()
assert not torch.pretend.is_bf16_supported(including_emulation=False)
assert report.rates["tf32"] is None
assert report.accelerated == ("fp16",), report.rates
assert recommend_precision(device) is Precision.FP16
assert recommend_precision(device).grad_scaler("pretend").is_enabled()
assert "fp16" in report.reason and "scaler" in report.reason


def seconds(dtype):
    x = torch.ones(256, 256, device=device, dtype=dtype)
    return measure(lambda: x @ x, device=device, warmup=1, repeats=3).median_s


assert seconds(torch.bfloat16) > 2 * seconds(torch.float32) > 2 * seconds(torch.float16)
"""

# What picks a dtype by itself, after T4: bench, doctor, and advise.
T4_CHOICES = """
from amp_lab import advise
from amp_lab.bench.runner import _choose_precisions
from amp_lab.cli.doctor import _recipe

assert _choose_precisions(report, ()) == ["fp32", "fp16"]
recipe = "\\n".join(_recipe(report.recommended, device.type))
assert "float16" in recipe and "GradScaler" in recipe and "bfloat16" not in recipe

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
advice = advise(model, torch.randn(4, 8), gpu="t4")
fast = {c.recipe.precision for c in advice.candidates if c.verdict == "not timed"}
assert fast == {"fp32", "fp16"}
"""

CODES = {
    "device": DEVICE,
    "timing": TIMING,
    "autocast": AUTOCAST,
    "batches": BATCHES,
    "training": TRAINING,
    "xray of a device that is not there": XRAY,
}


def test_the_package_works_beside_an_accelerator_of_another_make():
    """All in one process, since each takes seconds to load torch and the device."""
    one_by_one = "\n".join(f"print({name!r})\nexec({code!r}, {{}})" for name, code in CODES.items())
    done = run(one_by_one)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]  # the last name is what failed
    assert done.stdout.split("\n")[:-1] == [*CODES]


def test_on_a_t4_everything_chooses_fp16_with_a_scaler():
    done = run(T4 + T4_CHOICES, PRETEND_GPU="t4")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("module", "line", "fault", "name"),
    some_of(
        # a forgotten .to(device), a time read without waiting, memory pinned for one make alone,
        # a tensor that stays where it was, and a device type that is written in
        (
            "train/loop.py",
            "tensor.to(self.device, non_blocking=True, ",
            "tensor.to(",
            "training",
        ),
        (
            "core/timing.py",
            "        _synchronize(device)\n        samples",
            "        samples",
            "timing",
        ),
        (
            "train/data/batches.py",
            "backend(torch.device(self.device).type).pins_memory",
            "False",
            "batches",
        ),
        ("train/data/batches.py", "part.to(self.device, non_blocking=True)", "part", "batches"),
        ("core/precision.py", "torch.autocast(device_type,", 'torch.autocast("cpu",', "autocast"),
    ),
)
def test_a_planted_fault_is_found(tmp_path, module, line, fault, name):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SRC / "amp_lab", tmp_path / "amp_lab", ignore=ignored)
    path = tmp_path / "amp_lab" / module
    text = path.read_text()
    assert line in text, f"{module} has changed: plant the fault anew"
    path.write_text(text.replace(line, fault))
    done = run(CODES[name], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Error" in done.stderr


@pytest.mark.weekly
@pytest.mark.parametrize("gpu", ["", "t4"])
@pytest.mark.parametrize("source", build_pairs.find(), ids=lambda source: source.stem)
def test_a_notebook_runs_on_it(source, gpu):
    code = f"import runpy; runpy.run_path({str(source)!r}, run_name='__main__')"
    done = run(code, timeout_s=1200, PRETEND_GPU=gpu)
    assert done.returncode == 0, done.stderr[-2000:]


SMALL = "--dataset digits --model shufflenet_v2_x0_5 --limit 256 --precision fp16"
MODEL = "torchvision.models:shufflenet_v2_x0_5 --input 2,3,64,64"
COMMANDS = {
    "doctor": ["doctor"],
    "train and resume": [
        f"train {SMALL} --epochs 1 --out run",
        "train --out run --resume",
        "export run model.pt",
    ],
    "bench": ["bench --quick --rounds 1 --workload matmul --precision fp32 --out bench.json"],
    "ops": ["ops --device cuda --against mps"],
    "xray": [f"xray {MODEL} --device cuda", f"xray {MODEL} --device cpu --real"],
    "memory": [f"memory {MODEL} --device cuda --memory 8GiB"],
    "migrate": [f"migrate {SRC / 'amp_lab' / 'train' / 'data'}"],
}


@pytest.mark.parametrize("name", COMMANDS if WEEKLY else ["doctor"])
def test_a_command_runs_on_it(name, tmp_path):
    for line in COMMANDS[name]:
        code = (
            f"import os, sys; os.chdir({str(tmp_path)!r}); from amp_lab.cli import main; "
            f"sys.exit(main({line.split()!r}))"
        )
        done = run(code, timeout_s=600)
        assert done.returncode == 0, line + done.stdout + done.stderr[-2000:]


def test_out_of_memory_is_what_torch_raises():
    code = """
import pytest, torch
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(2**30, device="pretend")
"""
    assert passes(code, PRETEND_MEMORY_MIB="64")


@pytest.mark.weekly
def test_the_command_for_the_first_gpu_is_rehearsed_on_it(tmp_path):
    """A run that is killed and goes on, among others; the notebooks have a test of their own."""
    every = [part.name for part in first_gpu_parts.PARTS if not part.name.startswith("notebook")]
    every.remove("xray")  # fake tensors have no LSTM for a device of another make
    arguments = ["--device", "pretend", "--tiny", "--minutes", "20", "--out", str(tmp_path / "out")]
    arguments += [f"--part={name}" for name in every]
    code = f"import sys, first_gpu\nsys.exit(first_gpu.main({arguments!r}))"
    done = run(code, timeout_s=1300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(every)} of {len(every)} held" in done.stdout


@pytest.mark.weekly
def test_a_t4_is_recorded_on_it(tmp_path):
    code = f"""
import sys
import record
out = {str(tmp_path / "recorded.json")!r}
assert record.main(["--tiny", "--out", out]) == 0
sys.exit(record.main(["--write", out]))
"""
    done = run(code, timeout_s=900, PRETEND_GPU="t4")
    assert "| NVIDIA T4 |" in done.stdout, done.stdout + done.stderr
    assert "bench-quick-nvidia-t4.json: environment.rounds: 1 is a rehearsal" in done.stdout
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("record: bench-quick-nvidia-t4.json: ")
