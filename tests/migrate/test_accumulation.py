"""Mistakes of accumulation, of several optimizers or scalers, and of a scaler by itself.

Each is found in all of its wrong examples, which are as real projects write them, at the line that
ends in a comment `# !`, and in none of the right ones.
"""

import pytest

from amp_lab.migrate import migrate_source

HEAD = """\
import torch
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_
scaler = GradScaler("cuda")
"""
STEP = "scaler.step(opt); scaler.update(); opt.zero_grad()"

# One loop over micro-batches: what stands in it after the backward, and what after the loop.
LOOP = """\
{before}
for i, x in enumerate(loader):
    with autocast("cuda"):
        loss = model(x) / 4
    scaler.scale(loss).backward()
{inside}
{after}
"""


def loop(inside: str, after: str = "", before: str = "", head: str = HEAD) -> str:
    inside = "\n".join(f"    {line}" for line in inside.splitlines())
    return head + LOOP.format(inside=inside, after=after, before=before)


UNSCALED = "scaler.unscale_(opt)  # !\n"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)\n"
UNSCALED_EACH_WRONG = [
    loop(f"{UNSCALED}if (i + 1) % 4 == 0:\n    {STEP}"),
    loop(f"{UNSCALED}{CLIP}if (i + 1) % 4 == 0:\n    {STEP}"),
    loop(f"{UNSCALED}{CLIP}if (i + 1) % 4 == 0 or i + 1 == len(loader):\n    {STEP}"),
    loop(f"{UNSCALED}if is_last_micro_batch:\n    scaler.step(opt)\n    scaler.update()"),
    loop(f"{UNSCALED}if i % 4 != 3:\n    continue\nscaler.step(opt)\nscaler.update()"),
    loop(UNSCALED, after=STEP),
    "import torch\nclass T:\n    def fit(self):\n        for i, x in enumerate(self.loader):\n"
    "            self.scaler.scale(self.loss(x)).backward()\n"
    "            self.scaler.unscale_(self.opt)  # !\n"
    "            if i % self.every == 0:\n"
    "                self.scaler.step(self.opt)\n"
    "                self.scaler.update()\n",
    "import torch\nfor batch in loader:\n    for x in batch.split(4):\n"
    "        scaler.scale(f(x)).backward()\n"
    "        scaler.unscale_(opt)  # !\n    scaler.step(opt)\n    scaler.update()\n",
    loop(f"if clip:\n    {UNSCALED}    {CLIP}    if (i + 1) % 4 == 0:\n        {STEP}"),
    loop(
        f"if every > 1:\n    {UNSCALED}    if (i + 1) % every == 0:\n        {STEP}\n"
        f"else:\n    scaler.unscale_(opt)\n    {STEP}"
    ),
]
UNSCALE = "scaler.unscale_(opt)\n"
UNSCALED_EACH_RIGHT = [
    loop(f"{UNSCALE}{CLIP}{STEP}"),
    loop(f"if (i + 1) % 4 == 0:\n    {UNSCALE}    {CLIP}    {STEP}"),
    loop(f"{UNSCALE}norm = {CLIP}if norm < 9:\n    scaler.step(opt)\nscaler.update()"),
    loop(f"{UNSCALE}if bad:\n    scaler.update()\n    continue\nscaler.step(opt)\nscaler.update()"),
    loop(f"{UNSCALE}if bad:\n    break\n{STEP}"),
    loop(f"{UNSCALE}if bad:\n    raise ValueError\n{STEP}"),
    loop(f"if (i + 1) % 4:\n    continue\n{UNSCALE}{STEP}"),
    loop(f"{UNSCALE}if (i + 1) % 4 == 0:\n    finish(scaler, opt)\n    {STEP}"),
    loop("pass", after=f"{UNSCALE}{STEP}"),
    "for x in loader:\n    scaler.scale(f(x)).backward()\n    for opt in optimizers:\n"
    "        scaler.unscale_(opt)\n    for opt in optimizers:\n        scaler.step(opt)\n"
    "    scaler.update()\n",
]

PAIR = """\
import torch
from torch.amp import GradScaler, autocast
{made}
for x in loader:
    with autocast("cuda"):
        a, b = g(x), d(x)
{steps}
"""
TWO = 'scaler_g, scaler_d = GradScaler("cuda"), GradScaler("cuda")'


def pair(*steps: str, made: str = TWO) -> str:
    return PAIR.format(made=made, steps="\n".join(f"    {step}" for step in steps))


BACKWARD = ("scaler_g.scale(a).backward()", "scaler_d.scale(b).backward()")
UPDATE = ("scaler_g.update()", "scaler_d.update()")
ANOTHER_WRONG = [
    pair(
        *BACKWARD,
        "scaler_g.unscale_(opt_d)  # !",
        "scaler_g.step(opt_g)",
        "scaler_d.step(opt_d)",
        *UPDATE,
    ),
    pair(
        *BACKWARD,
        "scaler_d.unscale_(opt_g)  # !",
        "scaler_g.step(opt_g)",
        "scaler_d.step(opt_d)",
        *UPDATE,
    ),
    pair(BACKWARD[0], "scaler_d.unscale_(opt_g)  # !", "scaler_g.step(opt_g)", *UPDATE),
    pair(
        BACKWARD[1],
        "scaler_g.unscale_(opt_d)  # !",
        "if on: clip(d)",
        "scaler_d.step(opt_d)",
        *UPDATE,
    ),
    pair(BACKWARD[0], "if clip: scaler_d.unscale_(opt_g)  # !", "scaler_g.step(opt_g)", *UPDATE),
    "import torch\ndef step(loss, scaler_a, scaler_b, opt):\n"
    "    scaler_b.scale(loss).backward()\n"
    "    scaler_a.unscale_(opt)  # !\n    scaler_b.step(opt)\n    scaler_b.update()\n",
    "from torch.amp import GradScaler\nclass T:\n    def __init__(self):\n"
    "        self.scaler_g = GradScaler()\n"
    "        self.scaler_d = GradScaler()\n    def step(self, loss):\n"
    "        self.scaler_d.scale(loss).backward()\n"
    "        self.scaler_g.unscale_(self.opt_d)  # !\n"
    "        self.scaler_d.step(self.opt_d)\n        self.scaler_d.update()\n",
    "from torch.cuda.amp import GradScaler\nscaler1 = GradScaler()\nscaler2 = GradScaler()\n"
    "def step(loss):\n    scaler2.scale(loss).backward()\n    scaler1.unscale_(opt)  # !\n"
    "    scaler2.step(opt)\n    scaler1.update()\n    scaler2.update()\n",
]
ANOTHER_RIGHT = [
    pair(
        *BACKWARD,
        "scaler_g.unscale_(opt_g)",
        "scaler_g.step(opt_g)",
        "scaler_d.unscale_(opt_d)",
        "scaler_d.step(opt_d)",
        *UPDATE,
    ),
    pair(
        *BACKWARD,
        "scaler_g.unscale_(opt_g)",
        "scaler_d.unscale_(opt_d)",
        "scaler_g.step(opt_g)",
        "scaler_d.step(opt_d)",
        *UPDATE,
    ),
    pair(*BACKWARD, "scaler_g.step(opt_g)", "scaler_d.step(opt_d)", *UPDATE),
    pair(
        BACKWARD[0],
        "scaler_d.unscale_(opt_g)",
        "scaler_g.step(opt_g)",
        made='scaler_g = GradScaler("cuda")\nscaler_d = scaler_g',
    ),
    pair(
        "if on:",
        "    scaler_g.scale(a).backward(); scaler_g.unscale_(opt)",
        "    scaler_g.step(opt); scaler_g.update()",
        "else:",
        "    scaler_d.scale(b).backward(); scaler_d.unscale_(opt)",
        "    scaler_d.step(opt); scaler_d.update()",
    ),
    pair(
        "scaler_d.scale(b).backward()",
        "if on: scaler_g.unscale_(opt)",
        "else: scaler_d.step(opt)",
        "scaler_d.update()",
    ),
    pair(
        "scaler_g.scale(a).backward()",
        "scaler_g.unscale_(opt)",
        "scaler_g.step(opt)",
        "scaler_g.update()",
        "opt.zero_grad()",
        "scaler_d.scale(b).backward()",
        "scaler_d.step(opt)",
        "scaler_d.update()",
    ),
    "def step(loss, scaler, opt):\n    scaler.scale(loss).backward()\n    scaler.unscale_(opt)\n"
    "    scaler.step(opt)\n    scaler.update()\n",
]

PROGRAM = """\
import torch
from torch import nn
from torch.cuda.amp import GradScaler
{imports}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)
model = {model}
scaler = GradScaler({arguments})  # !
for x in loader:
    loss = model(x).sum()
    {backward}
    scaler.step(opt)
    scaler.update()
"""


def program(
    imports="", model="Net()", arguments="", backward="scaler.scale(loss).backward()"
) -> str:
    return PROGRAM.format(imports=imports, model=model, arguments=arguments, backward=backward)


ALONE_WRONG = [
    program(),
    program("import numpy as np, os"),
    program("import torchvision", "torchvision.models.resnet18()"),
    program("from torchvision.models import resnet18", "resnet18()"),
    program("import timm", "timm.create_model('x')"),
    program(model="nn.Sequential(nn.Linear(3, 2))"),
    program(arguments="init_scale=1024.0"),
    program(arguments="enabled=True"),
    program("from torch.cuda.amp import autocast"),
    program("from torch.utils.data import DataLoader", "Net().cuda()"),
]
ALONE_RIGHT = [
    program(arguments="enabled=False"),
    program("from raft import RAFT", "RAFT()"),
    program("from .models import Other", "Other()"),
    program("import transformers"),
    program(model="Net().half()"),
    program(model="Net().to(torch.float16)"),
    program(backward="with torch.autocast('cuda'): pass\n    scaler.scale(loss).backward()"),
    program(model="given"),
    program(backward="loss.backward()"),
    program().replace("model =", "def fit(model):\n  pass\nmodel =").replace("Net()", "load()"),
]

WRONG = {
    "unscale_ runs for each batch": UNSCALED_EACH_WRONG,
    "unscales again": ANOTHER_WRONG,
    "nothing runs in autocast": ALONE_WRONG,
}
RIGHT = UNSCALED_EACH_RIGHT + ANOTHER_RIGHT + ALONE_RIGHT
CASES = [(words, code) for words, codes in WRONG.items() for code in codes]


def mistakes(code: str) -> list[tuple[int, str]]:
    return [(f.line, f.message) for f in migrate_source(code)[1] if f.kind == "mistake"]


def test_there_are_twenty_of_each():
    assert min(len(CASES), len(RIGHT)) >= 20
    assert len({code for _, code in CASES}) == len(CASES)


@pytest.mark.parametrize(("words", "code"), CASES)
def test_a_mistake_is_told_at_its_line_and_alone(words, code):
    compile(code, "wrong", "exec")
    expected = [n for n, line in enumerate(code.splitlines(), 1) if line.endswith("# !")]
    told = mistakes(code)
    assert [line for line, _ in told] == expected
    assert words in told[0][1]


@pytest.mark.parametrize("code", RIGHT)
def test_right_code_gives_no_alarm(code):
    compile(code, "right", "exec")
    assert mistakes(code) == []
