"""The tables in data/results/README.md: the gallery of devices, and the cost of our own code."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
BEGIN = "<!-- {}: made by tools/record.py --write -->"
END = "<!-- end of the {} -->"
NONFINITE = "numerics/nonfinite/{}/times as long as plain/{}"
COUNTED = "numerics/underflow/{}/times as long as step/step with counting"
READ = "loading/as generated/times as fast as torchvision/{}"
SMALL = "resnet18 64x32x32"
LARGE = "resnet18 8x224x224"
TEXT = "transformer 4x256, 8x256 tokens"
COSTS = {  # for each row of the table: the file, and the place in it (in a list: which entry)
    "time of a bf16 step with `fit`, relative to a plain loop": {
        "ResNet-18, 64x32": "peers/peers/peer=amp_lab;precision=bf16",
        "gpt-nano, 8x256": "peers/text/peer=amp_lab;precision=bf16",
    },
    "time that `fit` adds to this step, measured separately": {
        "ResNet-18, 64x32": "training/added/resnet18 bf16/share of a step",
        "MobileNetV2, 64x32": "training/added/mobilenet_v2 bf16/share of a step",
        "gpt-nano, 8x256": "training/added/gpt-nano bf16/share of a step",
    },
    "speed of reading JPEG files, relative to torchvision's loop": {
        "`amp-lab train`": READ.format("amp_lab"),
        "the method of timm": READ.format("timm"),
    },
    "time of a step with the recipe of `advise`, relative to bf16 in Lightning Fabric": {
        name: f"peers/recommended/peer=recommended;workload={workload}"
        for name, workload in (
            ("ResNet-50, 8x224", "resnet50 8x3x224x224"),
            ("MobileNetV2, 8x224", "mobilenet_v2 8x3x224x224"),
            ("gpt-nano, 8x256", "gpt-nano 8x256"),
        )
    },
    "time of a step with `gradient_underflow`, relative to one without": {
        "ResNet-18, 8x224": COUNTED.format(LARGE),
        "ResNet-18, 64x32": COUNTED.format(SMALL),
        "transformer, 8x256": COUNTED.format(TEXT),
    },
    "time of a step in `find_nonfinite`, relative to one without": {
        "ResNet-18, 8x224": NONFINITE.format(LARGE, "find_nonfinite"),
        "ResNet-18, 64x32": NONFINITE.format(SMALL, "find_nonfinite"),
        "ResNet-18, 64x32: an empty dispatch mode instead": NONFINITE.format(SMALL, "empty mode"),
        "ResNet-18, 64x32: added by reading values only": NONFINITE.format(SMALL, "looks alone"),
        "transformer, 8x256": NONFINITE.format(TEXT, "find_nonfinite"),
        "transformer, 8x256: an empty dispatch mode instead": NONFINITE.format(TEXT, "empty mode"),
        "transformer, 8x256: added by reading values only": NONFINITE.format(TEXT, "looks alone"),
    },
}


NOTHING = "–"


def speedup_text(value: float | None) -> str:
    """A speed-up for the table; a dash where there is none."""
    if value is None:
        return NOTHING
    return f"{value:.3g}x"


def row(bench: Path) -> list[str]:
    """A row of the gallery: of a device's file of `amp-lab bench`, and its latency file."""
    recorded = json.loads(bench.read_text())
    environment = recorded["environment"]
    device = environment["device"]
    if "CPU" in environment["backend"]:
        device += f", {environment['threads']} threads"
    latency = bench.with_name(re.sub("^bench(-quick)?", "latency", bench.name))
    return [
        device,
        environment["torch"],
        environment["date"],
        *_speedups_of_matmul(recorded["flops_per_s"]),
        _best_of_convmodel(recorded["rows"]),
        _best_for_one_image(latency),
    ]


def _speedups_of_matmul(flops_per_s: dict[str, float | None]) -> list[str]:
    """The speed-ups over fp32 of a matmul, in TF32, fp16 and bf16."""
    fp32 = flops_per_s["fp32"]
    assert fp32 is not None, "every device has fp32"
    cells = []
    for precision in ("tf32", "fp16", "bf16"):
        rate = flops_per_s[precision]
        cells.append(speedup_text(None if rate is None else rate / fp32))
    return cells


def _best_of_convmodel(rows: list[dict]) -> str:
    """The best trusted speed-up of the ConvModel, with its precision and rung."""
    trusted = []
    for recorded in rows:
        is_timed = recorded["status"] == "ok" and recorded["workload"] == "convmodel"
        if is_timed and recorded["trusted"]:
            trusted.append(recorded)
    if not trusted:
        return NOTHING
    best = max(trusted, key=_speedup)
    return f"{speedup_text(best['speedup'])} ({best['precision']}, {best['rung']})"


def _speedup(recorded: dict) -> float:
    return recorded["speedup"]


def _best_for_one_image(latency: Path) -> str:
    """The best speed-up of a ResNet-18 on one image, and how; a dash if it was not measured."""
    if not latency.exists():
        return NOTHING
    models = {entry["model"]: entry for entry in json.loads(latency.read_text())["latency"]}
    resnet = models.get("resnet18")
    if resnet is None or not resnet["trusted"]:
        return NOTHING
    fastest = resnet["fastest of the others of torch"]
    speedups = resnet["times as fast as fp32"]
    if fastest not in speedups:
        return "fp32"
    return f"{speedup_text(speedups[fastest]['median'])} ({fastest})"


def gallery(more: Iterable[Path] = ()) -> str:
    """The table of all recorded devices, then of `more` files of `amp-lab bench`, in Markdown."""
    head = ["device", "torch", "date", "TF32", "fp16", "bf16", "ConvModel", "one image"]
    files = [*sorted(RESULTS.glob("bench-*.json")), *more]
    return table([head, *map(row, files)])


def table(rows: list[list[str]]) -> str:
    """Rows of cells in Markdown, the first as its head."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def figure(device: str, place: str) -> str:
    """A recorded figure of a device with its interval; a dash where nothing was recorded.

    `place` has the first word of the file's name, and then keys, such as
    ``peers/peers/peer=amp_lab;precision=bf16``; the last one picks an entry from a list.
    """
    file, *keys = place.split("/")
    path = RESULTS / f"{file}-{device}.json"
    if not path.exists():
        return NOTHING
    entry = json.loads(path.read_text())
    is_trusted = True
    for key in keys:
        entry = _inside(entry, key)
        if isinstance(entry, dict):
            is_trusted = entry.get("trusted", is_trusted)
    median = entry.get("median", entry.get("ratio"))  # the name of the figure in files of peers
    if median is None:  # not measured there, or it could not run
        return NOTHING
    low, high = entry["interval"]
    text = f"{median:.2f} ({low:.2f} to {high:.2f})"
    if place.endswith(("share of a step", "looks alone")):  # a part of a step's time, not a ratio
        text = f"{100 * median:.2g} % ({100 * low:.2g} to {100 * high:.2g})"
    if not is_trusted:
        text += ", not trusted"
    return text


def _inside(entry: dict | list[dict], key: str) -> Any:
    """The value of a key; in a list the entry with the values of a key such as ``a=1;b=2``."""
    if isinstance(entry, dict):
        return entry.get(key, {})
    wanted = dict(pair.split("=") for pair in key.split(";"))
    for candidate in entry:
        if wanted.items() <= candidate.items():
            return candidate
    return {}


def costs() -> str:
    """The table of the cost of our own code, in Markdown: a column for each device."""
    devices = [path.stem.partition("-")[2] for path in sorted(RESULTS.glob("numerics-*.json"))]
    rows = [["what", "", *devices]]
    for what, places in COSTS.items():
        heading = what  # in the first row alone
        for name, place in places.items():
            rows.append([heading, name, *(figure(device, place) for device in devices)])
            heading = ""
    return table(rows)


def with_tables(text: str) -> str:
    """The text of the README with its tables made anew from the files."""
    tables = {"gallery": gallery(), "costs": costs()}
    for name, new_table in tables.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        text = f"{before}{begin}\n\n{new_table}\n\n{end}{after}"
    return text
