"""Compiles the pretend accelerator for the torch that is installed, once for both versions."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import filelock
import torch

SOURCE = Path(__file__).with_name("pretend.cpp")


def library() -> Path:
    """The compiled library, after half a minute the first time. Raises `RuntimeError`."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"amp-lab-pretend-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / "libpretend.so"
    with filelock.FileLock(folder / "lock"):  # several test processes ask at the same time
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    draft = target.with_suffix(".new")
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-O1", "-fPIC", "-shared", "-std=c++20", "-w", abi]
    done = subprocess.run(
        ["g++", *flags, *include, str(SOURCE), "-o", str(draft), *link],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"g++ could not compile {SOURCE.name}: {done.stderr[-2000:]}")
    draft.replace(target)
