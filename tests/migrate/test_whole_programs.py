"""Whole programs that train in float16 autocast without a scaler, and those that may well do."""

import pytest

from amp_lab.migrate import migrate_source

HEAD = """\
import torch
from torch import nn
model = nn.Linear(2, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for x in loader:
    with {cast}:
        {inside}
    {after}
    optimizer.step()
"""
FLOAT16 = 'torch.autocast("cuda", dtype=torch.float16)'
LOSS = "loss = model(x).mean()"
BACKWARD = "loss.backward()  # !"


def loop(cast: str = FLOAT16, inside: str = LOSS, after: str = BACKWARD, head: str = "") -> str:
    return HEAD + head + LOOP.format(cast=cast, inside=inside, after=after)


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


FORWARD = """\
class Net(nn.Module):
    def forward(self, x):
        with torch.autocast("cuda"):
            return self.layer(x)
model = Net().cuda()
"""
PLAIN = "for x in loader:\n    loss = {call}\n    loss.backward()  # !\n    optimizer.step()\n"
FUNCTION = 'def {name}:\n    with torch.autocast("cuda"):\n        return model(x).mean()\n'
WRONG = [
    loop(),
    loop('torch.autocast("cuda")'),
    loop('torch.autocast(device_type="cuda")'),
    loop("torch.cuda.amp.autocast()"),
    loop("torch.amp.autocast('cuda', torch.half)"),
    loop("torch.autocast(device.type, torch.float16)"),
    loop("torch.autocast('cpu', dtype=torch.float16)"),
    loop("torch.autocast('cuda', torch.float16, True)"),
    loop("torch.autocast('cuda', enabled=use_amp)", head="use_amp = True\n"),
    loop("torch.autocast('cuda', dtype=dtype)", head="dtype = torch.float16\n"),
    loop("torch.autocast(device)", head="device = 'cuda'\n"),
    loop("torch.autocast('cuda', enabled=args.fp16)"),
    loop("cast", head=f"cast = {FLOAT16}\n"),
    loop("torch.set_grad_enabled(phase == 'train'), torch.autocast('cuda')"),
    loop(inside="out = model(x)", after="loss = out.float().mean()\n    loss.backward()  # !"),
    loop(inside="out = model(x)", after="nn.functional.mse_loss(out, x).backward()  # !"),
    loop(inside="out = model(x)", after="out.loss.backward()  # !"),
    loop(inside="out, loss = model(x)"),
    loop(after="(loss / 4).backward()  # !"),
    loop(after="torch.autograd.backward(loss)  # !"),
    loop(after="loss.backward()  # !\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    loop(inside="losses.append(model(x))", after="total = sum(losses)\n    total.backward()  # !"),
    loop(inside="total += model(x)", after="total.backward()  # !"),
    loop(inside="losses[i] = model(x)", after="losses[i].backward()  # !"),
    loop().replace("    optimizer.step()", "    if i % 4 == 3:\n        optimizer.step()"),
    loop(head="adam = torch.optim.Adam(w)\n").replace("optimizer.step", "adam.step"),
    HEAD + FUNCTION.format(name="f(x)") + PLAIN.format(call="f(x)"),
    HEAD
    + '@torch.autocast("cuda")\ndef f(x):\n    return model(x)\n'
    + PLAIN.format(call="f(x).mean()"),
    HEAD + FORWARD + PLAIN.format(call="model(x).mean()"),
    HEAD
    + "def train(model, opt, loader):\n"
    + indented(loop().removeprefix(HEAD)).replace("optimizer", "opt")
    + 'if __name__ == "__main__":\n    train(model, optimizer, loader)\n',
    HEAD
    + "class Trainer:\n    def step(self, x):\n        with torch.autocast('cuda'):\n"
    + "            self.loss = self.model(x)\n        self.loss.backward()  # !\n"
    + "        self.optimizer.step()\nif __name__ == '__main__':\n    Trainer().step(x)\n",
]
FLOAT32 = (
    "for x in loader:\n    loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n"
)
VALIDATE = "    with {guard}torch.autocast('cuda'):\n        {inside}\n"
RIGHT = [
    loop("torch.autocast('cuda', dtype=torch.bfloat16)"),
    loop("torch.autocast('cuda', dtype=args.dtype)"),
    loop(
        "torch.autocast('cuda', dtype=dtype)",
        head="dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16\n",
    ),
    loop("torch.autocast('cuda', torch.float16, False)"),
    loop("torch.cuda.amp.autocast(False)"),
    loop("torch.autocast('cuda', enabled=use_amp)", head="use_amp = False\n"),
    loop("torch.autocast('cuda', enabled=chosen)"),
    loop("torch.autocast('cuda', **options)"),
    loop("torch.autocast('cpu')"),
    loop("torch.cpu.amp.autocast()"),
    loop("torch.autocast(device.type)"),
    loop("torch.autocast('cuda')", head="torch.set_autocast_dtype('cuda', torch.bfloat16)\n"),
    HEAD + "with torch.no_grad(), torch.autocast('cuda'):\n    y = model(x)\n",
    HEAD + FLOAT32 + VALIDATE.format(guard="torch.no_grad(), ", inside=LOSS),
    HEAD + FLOAT32 + VALIDATE.format(guard="", inside=LOSS),
    HEAD + FLOAT32 + "for x in other:\n" + VALIDATE.format(guard="", inside=LOSS),
    HEAD + "for x in other:\n" + VALIDATE.format(guard="", inside=LOSS) + FLOAT32,
    HEAD + "@torch.no_grad()\n" + FUNCTION.format(name="check(x)") + FLOAT32 + "    check(x)\n",
    loop(
        "torch.no_grad(), torch.autocast('cuda')", "goal = teacher(x)", "model(x, goal).backward()"
    ),
    loop(
        inside="goal = teacher(x).detach()", after="loss = f(model(x), goal)\n    loss.backward()"
    ),
    loop(after="scaler.scale(loss).backward()", head="scaler = torch.amp.GradScaler()\n").replace(
        "optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"
    ),
    loop(after="loss_scaler(loss, optimizer)", head="from timm.utils import NativeScaler\n"),
    loop(head="from accelerate import Accelerator\n"),
    loop(head="import lightning\n"),
    loop(head="from helpers import step\n"),
    loop(head="from .helpers import step\n"),
    loop(after="(loss * 1024).backward()"),
    loop(after="loss.backward()\n    for p in w: p.grad /= 1024"),
    loop(head="model = model.half()\n"),
    loop(head="model = model.to(torch.float16)\n"),
    loop(head="model.register_full_backward_hook(f)\n"),
    HEAD
    + "class Trainer:\n    def step(self, x):\n        with torch.autocast('cuda'):\n"
    + "            self.shown = self.model(x)\n        self.loss = self.model(x)\n"
    + "        self.loss.backward()\n        self.optimizer.step()\n"
    + "if __name__ == '__main__':\n    Trainer().step(x)\n",
    loop(inside="shown[i] = model(x)", after="losses[i] = model(x)\n    losses[i].backward()"),
    loop().replace("    optimizer.step()\n", ""),
    loop().replace("optimizer.step()", "scheduler.step()"),
    loop().replace("model = nn.Linear(2, 1)", "model = load()"),
    HEAD + "def f(loader):\n" + indented(loop().removeprefix(HEAD)),
    HEAD
    + "for x in loader:\n    if amp:\n        with torch.autocast('cuda'):\n"
    + "            loss = model(x)\n    else:\n        loss = model(x)\n"
    + "        loss.backward()\n        optimizer.step()\n",
]


def mistakes(code: str) -> list[tuple[int, str]]:
    return [(f.line, f.message) for f in migrate_source(code)[1] if f.kind == "mistake"]


@pytest.mark.parametrize("code", WRONG)
def test_training_in_float16_without_a_scaler_is_told_at_its_backward_and_once(code):
    compile(code, "wrong", "exec")
    expected = [n for n, line in enumerate(code.splitlines(), 1) if line.endswith("# !")]
    ((line, message),) = mistakes(code)
    assert [line] == expected
    assert "small gradients become 0 without a scaler" in message


@pytest.mark.parametrize("code", [code for code in WRONG if "cuda.amp" in code])
def test_it_is_still_told_after_the_names_are_rewritten(code):
    assert mistakes(migrate_source(code)[0]) == mistakes(code)


@pytest.mark.parametrize("code", RIGHT)
def test_what_may_be_right_gives_no_alarm(code):
    compile(code, "right", "exec")
    assert mistakes(code) == []


def test_the_advice_names_the_device_and_the_optimizer():
    ((_, message),) = mistakes(loop("torch.autocast(device.type, torch.float16)"))
    assert "torch.amp.GradScaler(device.type)" in message
    assert "scaler.step(optimizer)" in message
    ((_, message),) = mistakes(loop("torch.cuda.amp.autocast()"))
    assert 'torch.amp.GradScaler("cuda")' in message
