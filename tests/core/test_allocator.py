"""Memory that is taken anew: counted in pages, in a process of its own."""

import json
import os
import platform
import subprocess
import sys

import pytest

from amp_lab.bench import runner
from amp_lab.cli import main
from amp_lab.core import allocator
from amp_lab.core.allocator import ENVIRONMENT, keep_memory, memory_taken
from amp_lab.train import run as train

TRIES = """
import json, torch
from amp_lab.core.allocator import keep_memory, memory_taken

def make():
    torch.ones(10 * 2**20)  # 40 MiB

def taken():
    for _ in range(20):
        make()
    return memory_taken(make)

before, could = taken(), keep_memory()
print(json.dumps([before, could, taken()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="takes glibc")
def test_kept_memory_is_not_taken_anew():
    done = subprocess.run([sys.executable, "-c", TRIES], capture_output=True, text=True, check=True)
    before, could, after = json.loads(done.stdout)
    page = os.sysconf("SC_PAGE_SIZE")
    assert before > 15 * page  # 20 where the system makes pages of 2 MiB, else 10,240
    assert could
    assert after < 8 * page


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="takes glibc")
def test_the_environment_keeps_memory_too():
    settings = dict(pair.split("=") for pair in ENVIRONMENT.split())
    done = subprocess.run(
        [sys.executable, "-c", TRIES],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | settings,
    )
    assert json.loads(done.stdout)[0] < 8 * os.sysconf("SC_PAGE_SIZE")


def test_elsewhere_nothing_is_set(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
    monkeypatch.setattr(sys, "platform", "win32")
    assert not keep_memory()
    assert memory_taken(lambda: bytearray(2**26)) == 0


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("amp_lab.core.allocator.ctypes.CDLL", lambda name: object())
    assert not keep_memory()


class Kept(Exception):
    """Raised where memory would be kept, so that nothing is trained or measured."""


@pytest.mark.parametrize(
    ("module", "command"),
    [(allocator, ["train", "--out", "run"]), (runner, ["bench", "--quick", "--device", "cpu"])],
    ids=["train", "bench"],
)
def test_train_and_bench_keep_memory_before_they_begin(module, command, monkeypatch, tmp_path):
    def keep():
        raise Kept

    def begin(*given, **settings):
        pytest.fail("it began before memory was kept")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "keep_memory", keep)
    monkeypatch.setattr(train, "train", begin)
    monkeypatch.setattr(runner, "measure_ceilings", begin)
    for name in ("describe_device", "_choose_precisions", "_plan"):  # which time products
        monkeypatch.setattr(runner, name, lambda *given, **settings: [])
    with pytest.raises(Kept):
        main(command)
