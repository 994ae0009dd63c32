import importlib.metadata

import pytest

import sync


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("2.15.0", []),
        ("2.11.0+rocm7.1", ["--without", "torch"]),
        ("2.13.0+cpu", ["--without", "torch"]),
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


def test_without_pdm_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert sync.main() == 2
    assert "no command `pdm`" in capsys.readouterr().err
