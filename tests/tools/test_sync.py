import importlib.metadata
import subprocess
import tomllib
from types import SimpleNamespace

import pytest

import sync


@pytest.fixture
def pdm(monkeypatch, tmp_path):
    """Stands in for pdm: notes what it is called with, and exits as it is told to."""
    pdm = SimpleNamespace(calls=[], code=0)

    def run(command, cwd):
        assert command[:2] == ["/somewhere/pdm", "--no-cache"]
        pdm.calls.append(command[2:])
        return SimpleNamespace(returncode=pdm.code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sync.shutil, "which", lambda name: f"/somewhere/{name}")
    monkeypatch.setattr(sync, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(sync, "without_torch", lambda: [])
    return pdm


def test_it_syncs_once(pdm):
    assert sync.main([]) == 0
    assert sync.main([]) == 0
    assert pdm.calls == [["sync"]]


def test_it_syncs_again_when_the_lock_has_changed(pdm, monkeypatch):
    sync.main([])
    monkeypatch.setattr(sync, "fingerprint", lambda: "another lock")
    sync.main([])
    assert pdm.calls == [["sync"], ["sync"]]


def test_a_sync_that_failed_says_what_is_free_and_is_tried_again(pdm, monkeypatch, capsys):
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda path: SimpleNamespace(free=260_000_000))
    pdm.code = 1
    assert sync.main([]) == 1
    assert "failed, with 0.3 GB free in " in capsys.readouterr().err
    pdm.code = 0
    assert sync.main([]) == 0
    assert len(pdm.calls) == 2


def test_arguments_go_to_pdm(pdm):
    sync.main(["--without", "browser"])
    assert pdm.calls == [["sync", "--without", "browser"]]


def test_without_pdm_it_says_so(pdm, monkeypatch, capsys):
    monkeypatch.setattr(sync.shutil, "which", lambda name: None)
    assert sync.main([]) == 2
    assert "no command `pdm`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("2.15.0", []),
        ("2.11.0+rocm7.1", ["--without", "torch", "--without", "bench"]),
        ("2.13.0+cpu", ["--without", "torch", "--without", "bench"]),
    ],
)
def test_a_torch_that_is_not_from_the_lock_is_kept(monkeypatch, version, arguments):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert sync.without_torch() == arguments


def test_a_fresh_environment_gets_everything(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert sync.without_torch() == []


def test_what_is_left_out_leaves_no_torch():
    """No other group may bring the lock's torch along."""
    left_out = {"torch", "bench"}
    lock = tomllib.loads((sync.ROOT / "pdm.lock").read_text())
    torch = [package for package in lock["package"] if package["name"].startswith("torch")]
    assert torch
    assert all(set(package["groups"]) <= left_out for package in torch)
