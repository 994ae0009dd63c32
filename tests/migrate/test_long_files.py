"""Long files take time in proportion to their length: counted in lines of the package that ran."""

import sys
import threading
from collections import Counter

import pytest

from amp_lab.migrate.rules import edits_and_findings
from amp_lab.migrate.tree.rewriter import apply

IMPORTS = "import torch\nfrom torch.cuda.amp import autocast, GradScaler\n"
STEP = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"
# What a file begins with, and what it then has again and again.
FILES = {
    "blocks": (IMPORTS, "with autocast():\n    pass\n"),
    "blocks through torch": ("import torch\n", "with torch.cuda.amp.autocast():\n    pass\n"),
    "blocks by a star": ("from torch.cuda.amp import *\n", "with autocast():\n    pass\n"),
    "imports": ("", "from torch.cuda.amp import autocast\nautocast()\n"),
    "functions": (IMPORTS, "def f{0}(x):\n    with autocast():\n        pass\n"),
    "steps": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "with autocast():\n    loss = model(x)\nscaler.scale(loss).backward()\n"
        "torch.nn.utils.clip_grad_norm_(p, 1)\nscaler.step(optimizer)\nscaler.update()\n",
    ),
    "steps with unscale_": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "for x in data:\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    ),
    "scalers": (
        "import torch\n",
        "scaler{0} = torch.cuda.amp.GradScaler()\nscaler{0}.scale(loss).backward()\n"
        "scaler{0}.step(optimizer)\noptimizer.step()\n",
    ),
    "made in functions": (
        IMPORTS,
        "def f{0}():\n    scaler = GradScaler()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\nfor e in range(3):\n    f{0}()\n",
    ),
    "Apex": ("from apex import amp\n", "with amp.scale_loss(loss, o) as s:\n    s.backward()\n"),
    "checkpoints": (
        f"{IMPORTS}scaler = GradScaler()\n{STEP}optimizer.load_state_dict(state)\n",
        "torch.save({{'optimizer': optimizer.state_dict()}}, 'x')\n",
    ),
    "accumulation": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "for i, b in enumerate(loader):\n    scaler.scale(loss).backward()\n    if i % 4 == 0:\n"
        "        scaler.step(optimizer)\n        scaler.update()\n",
    ),
    "updates that are skipped": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "for x in data:\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n"
        "    if bad(x):\n        optimizer.zero_grad()\n        continue\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    ),
    "functions that return": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "def f{0}(x):\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n"
        "    if bad(x):\n        return\n    scaler.step(optimizer)\n    scaler.update()\n"
        "for x in data:\n    f{0}(x)\n",
    ),
    "Apex, left over": ("import torch\n", "from apex import amp\n"),
    "two branches": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "if use_amp:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\nelse:\n"
        "    loss.backward()\noptimizer.step()\n",
    ),
    "clips": (
        f"{IMPORTS}scaler = GradScaler()\n",
        "scaler.scale(loss).backward()\nclip_grad_norm_(p, 1.0)\nscaler.step(optimizer)\n"
        "factor{0} = scaler.get_scale()\n",
    ),
    "a program in bfloat16": (
        "import torch\nmodel = torch.nn.Linear(2, 1)\n",
        "with torch.autocast('cuda', torch.bfloat16):\n    loss = model(x)\nloss.backward()\n"
        "optimizer.step()\n",
    ),
    "a program in float16": (
        "import torch\nmodel = torch.nn.Linear(2, 1)\n",
        "with torch.autocast('cuda', torch.float16):\n    loss = model(x)\nloss.backward()\n"
        "optimizer.step()\n",
    ),
    "other letters": (IMPORTS, "with autocast():  # ü\n    pass\n"),
    "guards": (
        "import torch\n",
        "if hasattr(torch.cuda.amp, 'autocast'):\n    from torch.cuda.amp import autocast\n"
        "else:\n    autocast = None\nautocast()\n",
    ),
}


def lines_run(text: str) -> Counter:
    """How often each line of the package runs; a comprehension's each time it comes round."""
    ran: Counter = Counter()

    def trace(frame, event, argument):
        file = frame.f_code.co_filename
        if "amp_lab" not in file:
            return None
        if event == "line":
            ran[file, frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)  # in which deep code is read
    try:
        edits, _ = edits_and_findings(text)
        apply(text, edits)
    finally:
        sys.settrace(before)
        threading.settrace(before)
    return ran


@pytest.mark.parametrize("kind", FILES)
def test_twice_as_long_a_file_is_twice_the_work(kind):
    start, part = FILES[kind]
    short, long = (lines_run(start + "".join(map(part.format, range(count)))) for count in (40, 80))
    # No line may run so much more often, since the rest would hide it at this length.
    worse = [line for line, count in long.items() if count > 2.5 * short[line] + 100]
    assert worse == []
