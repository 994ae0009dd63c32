"""What each recorded result says about the machine: one list of facts, in both kinds of files."""

import json
import platform
from types import SimpleNamespace

import torch

from amp_lab.bench import runner
from amp_lab.core.environment import environment_of
from measure import recording

REPORT = SimpleNamespace(name="a CPU", backend="CPU, AVX2, 1 threads", trusted=True)


def test_it_names_the_device_the_software_and_the_date():
    facts = environment_of(REPORT)
    assert list(facts) == ["device", "backend", "torch", "python", "system", "threads", "date"]
    assert (facts["device"], facts["backend"]) == (REPORT.name, REPORT.backend)
    assert facts["torch"] == str(torch.__version__)
    assert facts["python"] == platform.python_version()
    assert facts == json.loads(json.dumps(facts))


def test_a_new_fact_is_in_the_results_of_bench_and_of_the_measuring_tools(monkeypatch, tmp_path):
    for module in (runner, recording):
        monkeypatch.setattr(module, "environment_of", lambda report: {"a new fact": report.name})
    ceilings = SimpleNamespace(flops_per_s={}, stream_bytes_per_s={}, trusted=True)
    results = runner._new_results(REPORT, ceilings, quick=True, rounds=3)
    assert results.environment == {"a new fact": "a CPU", "quick": True, "rounds": 3}
    monkeypatch.setattr(recording, "describe_device", lambda device: REPORT)
    out = tmp_path / "result.json"
    options = recording.parser("what it does", ["one"]).parse_args(["--out", str(out)])
    recording.record({"one": lambda: 1}, options, torch.device("cpu"))
    assert json.loads(out.read_text())["a new fact"] == "a CPU"
