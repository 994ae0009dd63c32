"""What the package does, written down: to show that a change of its code changes nothing else.

    python tools/behaviour.py record before.json --checkout OLD
    python tools/behaviour.py record after.json
    python tools/behaviour.py compare before.json after.json

A recording holds the table of ops, each op's dtype, remark and forecast of many models, the output
of every command on the same targets, what is found of planted faults, and digests of runs that were
resumed. The models of other libraries (`--libraries`) are those that are installed.
The package is that of a checkout, which may be another one; the targets are those beside this file.
Both recordings have to come from one machine. `compare` prints what differs, and returns 1 if
anything does.
"""

import argparse
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
SMALL = f"{SUPPORT / 'small_models.py'}"
SNIPPETS = ROOT / "tests" / "migrate" / "snippets"
OLD_RUN = ROOT / "tests" / "train" / "old_run"

CNN = [f"{SMALL}:Cnn", "--input", "2,3,6,6"]
TRANSFORMER = [f"{SMALL}:Transformer", "--input", "int64:2,4<7"]
RNN = [f"{SMALL}:Rnn", "--input", "2,5,3"]
HEAD = [f"{SMALL}:Head", "--input", "2,8"]
RESNET = ["torchvision.models:resnet18", "--input", "2,3,64,64"]
TARGETS = {"cnn": CNN, "transformer": TRANSFORMER, "rnn": RNN, "head": HEAD, "resnet": RESNET}

OF_EVERY_TARGET = [
    ["xray"],
    ["xray", "--dtype", "fp16"],
    ["xray", "--device", "cpu", "--dtype", "bf16"],
    ["xray", "--against", "mps"],
    ["xray", "--depth", "2"],
    ["xray", "--format", "json"],
    ["xray", "--parallel", "fsdp"],
    ["xray", "--parallel", "ddp"],
    ["xray", "--loss", "torch:sum"],
    ["memory"],
    ["memory", "--memory", "1GiB", "--optimizer", "sgd"],
    ["memory", "--format", "json", "--fsdp-ranks", "4"],
    ["memory", "--eval"],
    ["rehearse"],
    ["rehearse", "--formats", "mxfp8,nvfp4", "--for", "b200", "--format", "json"],
    ["rehearse", "--eval"],
    ["diff", "--precision", "bf16"],
    ["diff", "--precision", "bf16", "--format", "json"],
    ["diff", "--batch-sizes", "1,2"],
]
"""Commands on a model, each run for every target."""

ALONE = [
    ["--help"],
    ["--version"],
    *[[name, "--help"] for name in (
        "doctor", "train", "sample", "export", "bench", "ops", "advise", "xray", "memory", "diff",
        "rehearse", "migrate",
    )],
    ["ops"],
    ["ops", "--device", "cpu", "--format", "json"],
    ["ops", "--device", "mps", "--against", "cuda", "--format", "markdown"],
    ["bench", "--list"],
    ["bench", "--rung", "none"],
    ["xray", "torchvision.models:resnet99", "--input", "1,3,8,8"],
    ["xray", f"{SMALL}:Cnn"],
    ["xray", f"{SMALL}:Cnn", "--input", "2,4,6,6"],
    ["xray", f"{SMALL}:Cnn", "--input", "int7:2"],
    ["memory", f"{SMALL}:Cnn", "--input", "2,3,6,6", "--memory", "lots"],
    ["diff", f"{SMALL}:Cnn", f"{SMALL}:Head", "--input", "2,3,6,6"],
    ["migrate", "migrate"],
    ["migrate", "migrate", "--diff"],
    ["migrate", "migrate", "--check", "--format", "github"],
    ["migrate", "migrate", "--format", "github", "--select", "mistakes"],
    ["migrate", "nowhere.py"],
]  # fmt: skip
"""Commands that take no model, or that are refused. `migrate` is a folder of old programs."""

RUN = ["--model", "squeezenet1_0", "--limit", "32", "--image-size", "24", "--batch-size", "8"]
TEXT = ["--dataset", "stdlib", "--model", "gpt-nano", "--limit", "32", "--batch-size", "8"]
TRAINING = [
    ["train", "--out", "whole", *RUN, "--epochs", "2"],
    ["train", "--out", "parts", *RUN, "--epochs", "1"],
    ["train", "--out", "parts", "--resume", "--epochs", "2"],
    ["train", "--out", "bf16", *RUN, "--epochs", "1", "--precision", "bf16", "--accumulate", "2"],
    ["train", "--out", "text", *TEXT, "--epochs", "1"],
    ["train", "--out", "text", "--resume", "--epochs", "2"],
    ["train", "--out", "old", "--resume", "--epochs", "4"],
    ["sample", "text", "--tokens", "20"],
    ["export", "parts", "weights.safetensors"],
    ["train", "--out", "whole", *RUN],
    ["train", "--resume", "--out", "nowhere"],
]
"""Runs, one after another in one folder; `old` is a run of an earlier version."""

MEASURED = re.compile(r"in [\d.]+ s,|[\d,.]+ (images|tokens)/s|peak memory [\d,.]+ MiB")
"""What training prints of its speed and memory."""


def main() -> int:
    """Record or compare, as the arguments say; return 1 if two recordings differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--checkout", type=Path, default=ROOT, help="whose package it is")
    recording.add_argument("--part", choices=PARTS, action="append", help="default: all")
    recording.add_argument("--libraries", action="store_true", help="the models of others too")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return print_differences(options.before, options.after)
    out = options.out.resolve()
    use_package(options.checkout.resolve())
    parts = options.part or list(PARTS)
    found = record(parts, options.libraries)
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def print_differences(before: Path, after: Path) -> int:
    """Print how two recordings differ; return 1 if they do."""
    recorded_before = json.loads(before.read_text(encoding="utf-8"))
    recorded_after = json.loads(after.read_text(encoding="utf-8"))
    lines = list(differences(recorded_before, recorded_after))
    if not lines:
        print("no difference")
        return 0
    print("\n".join(lines))
    return 1


def use_package(checkout: Path) -> None:
    """Import `amp_lab` from a checkout from here on, with one thread for torch."""
    folder = checkout / "src"
    if not folder.exists():  # older checkouts have the package beside the notebooks
        folder = checkout / "notebooks"
    # What the tests share imports modules of the package, so it is the checkout's own.
    sys.path[:0] = [str(folder), str(checkout / "tests" / "support")]
    import torch

    import amp_lab

    assert Path(amp_lab.__file__).is_relative_to(folder), amp_lab.__file__
    torch.set_num_threads(1)


def support(name: str) -> Any:
    """A module beside the tests, which makes models or runs."""
    return importlib.import_module(name)


def record(parts: list[str], libraries: bool) -> dict[str, dict[str, Any]]:
    """What each part shows: a name for each thing that was done, and its outcome."""
    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for part in parts:
            outcomes[part] = {}
            for name, outcome in PARTS[part]():
                print(f"{part}: {name}", file=sys.stderr, flush=True)
                outcomes[part][cleaned(name, folder)] = cleaned(outcome, folder)
        if libraries:
            outcomes["libraries"] = dict(of_libraries())
    return outcomes


def cleaned(outcome: Any, folder: str) -> Any:
    """An outcome without what no two recordings share: its folder, and speeds."""
    text = json.dumps(outcome, default=str).replace(folder, "FOLDER")
    text = text.replace(str(ROOT), "ROOT")
    return json.loads(MEASURED.sub("(measured)", text))


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class and text of what it raises."""
    import torch

    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:  # whatever it is, it is what the user would see
        return f"{type(error).__name__}: {error}"


def of_ops() -> Iterator[tuple[str, Any]]:
    """The rules of autocast, by device."""
    from amp_lab import op_table

    for device in ("cuda", "cpu", "mps", "xpu"):
        yield device, [str(rule) for rule in op_table(device)]


def of_commands() -> Iterator[tuple[str, Any]]:
    """Every command on the targets, as it is printed.

    The commands of `ALONE` read the folder ``migrate``, which is written to the working folder.
    """
    Path("migrate").mkdir()
    for path in SNIPPETS.glob("*.txt"):
        for number, code in enumerate(programs(path.read_text(encoding="utf-8"))):
            Path("migrate", f"{path.stem}_{number:03}.py").write_text(code, encoding="utf-8")
    for line in ALONE:
        yield " ".join(line), printed(line)
    for name, target in TARGETS.items():
        for command in OF_EVERY_TARGET:
            yield f"{name}: {' '.join(command)}", printed([command[0], *target, *command[1:]])


def of_runs() -> Iterator[tuple[str, Any]]:
    """Runs of training, resumed and not, with digests of what they leave."""
    from safetensors.torch import load_file

    from amp_lab import load_checkpoint

    support("tiny_classifier")  # which adds the model of the old run
    shutil.copytree(OLD_RUN, "old")
    for line in TRAINING:
        yield " ".join(line), printed(line)
    for folder in ("whole", "parts", "bf16", "text", "old"):
        yield f"state of {folder}", digest(load_checkpoint(Path(folder, "checkpoint.pt"))["model"])
    yield "safetensors", digest(load_file("weights.safetensors"))


def of_faults() -> Iterator[tuple[str, Any]]:
    """What `find_nonfinite` and `first_difference` say of planted faults."""
    diverging_models = support("diverging_models")
    planted_faults = support("planted_faults")
    for name, (make, *_) in planted_faults.FAULTS.items():
        yield f"nonfinite: {name}", outcome_of(functools.partial(_find_nonfinite, make))
    for number, fault in enumerate(diverging_models.FAULTS):
        call = functools.partial(_find_difference, fault)
        yield f"difference: {number} {fault.name}", outcome_of(call)


def _find_nonfinite(make: Callable) -> str:
    """The report of `find_nonfinite` on a model with a planted fault, which `make` builds."""
    model, x, options = make()
    return str(support("planted_faults").find(model, x, **options))


def _find_difference(fault: Any) -> str:
    """The report of `first_difference` on a sound model and one with a planted fault."""
    from amp_lab import first_difference

    diverging_models = support("diverging_models")
    sound, faulty = fault.models()
    ways = fault.runs.split()  # how each model is run: one word for both, or two
    run_a = diverging_models.runner(sound, ways[0])
    run_b = diverging_models.runner(faulty, ways[-1])
    return str(first_difference(run_a, run_b, diverging_models.INPUTS[fault.model](2)))


def of_libraries() -> Iterator[tuple[str, Any]]:
    """X-rays and forecasts of the models of other libraries that are installed."""
    library_models = support("library_models")
    for name, build in library_models.MODELS.items():
        if importlib.util.find_spec(library_models.LIBRARY_OF[name]) is None:
            continue
        print(f"libraries: {name}", file=sys.stderr, flush=True)

        yield name, outcome_of(functools.partial(_library_model, name, build))


def _library_model(name: str, build: Callable) -> dict[str, Any]:
    model, args, kwargs = build()
    model.train(name in support("library_models").TRAINED)
    return dict(of_model(model, args, kwargs))


def of_model(model: Any, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    """X-rays and forecasts of one model, as tables and as JSON."""
    import torch

    from amp_lab import forecast_memory, xray

    for device, dtype in (
        ("cuda", torch.float16), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16),
    ):  # fmt: skip
        trace = functools.partial(xray, model, *args, device_type=device, dtype=dtype, **kwargs)
        yield f"xray {device} {dtype}", outcome_of(functools.partial(_text_and_json, trace))
    for precision in ("fp32", "bf16"):
        forecast = functools.partial(forecast_memory, model, *args, precision=precision, **kwargs)
        yield f"memory {precision}", outcome_of(functools.partial(_text_and_json, forecast))


def _text_and_json(make_report: Callable[[], Any]) -> list[str]:
    """The report that a call makes, as text and as JSON."""
    report = make_report()
    return [str(report), report.to_json()]


def programs(text: str) -> list[str]:
    """The programs of a file of examples, which stand under lines that begin with ``===``."""
    return re.split(r"^=== .*\n", text, flags=re.MULTILINE)[1:]


def printed(line: list[str]) -> dict[str, Any]:
    """The exit code of a command and what it prints."""
    import torch

    from amp_lab.cli import main as amp_lab_main

    torch.manual_seed(0)
    out = io.BytesIO()
    err = io.BytesIO()
    out_text = io.TextIOWrapper(out, "utf-8", write_through=True)  # patches are written as bytes
    err_text = io.TextIOWrapper(err, "utf-8", write_through=True)
    with contextlib.redirect_stdout(out_text), contextlib.redirect_stderr(err_text):
        try:
            code = amp_lab_main(line)
        except SystemExit as error:  # from the parser
            code = error.code
    return {"code": code, "out": _lines_of(out), "err": _lines_of(err)}


def _lines_of(stream: io.BytesIO) -> list[str]:
    return stream.getvalue().decode("utf-8").splitlines()


def digest(weights: dict[str, Any]) -> str:
    """A digest of tensors and their names."""
    sha256 = hashlib.sha256()
    for name, value in sorted(weights.items()):
        sha256.update(name.encode())
        sha256.update(value.float().numpy().tobytes())
    return sha256.hexdigest()


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """The places where two recordings differ, each with its lines as a diff."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(after.keys() - before.keys())]:
            inside = f"{place} / {name}" if place else name
            if name not in before:
                yield f"{inside}: only after"
            elif name not in after:
                yield f"{inside}: only before"
            else:
                yield from differences(before[name], after[name], inside)
    elif before != after:
        yield place
        yield from _changed_lines(before, after)


def _changed_lines(before: Any, after: Any) -> Iterator[str]:
    for line in difflib.ndiff(_lines(before), _lines(after)):
        if line.startswith(("+ ", "- ")):
            yield f"    {line}"


def _lines(value: Any) -> list[str]:
    if isinstance(value, list):
        return [line for item in value for line in str(item).splitlines()]
    return str(value).splitlines()


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "ops": of_ops,
    "commands": of_commands,
    "faults": of_faults,
    "runs": of_runs,
}

if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    sys.exit(main())
