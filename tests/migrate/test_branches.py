"""Loops with a branch for mixed precision and one without: the advice is right for both."""

import pytest

from amp_lab.migrate import migrate_source

HEAD = 'import torch\nscaler = torch.amp.GradScaler("cuda")\nfor i, x in enumerate(loader):\n'
SCALED = "scaler.scale(model(x)).backward()"
WHOLE = f"{SCALED}\n    scaler.step(opt)\n    scaler.update()"
MOVE = (
    "already steps the optimizer in its branch: move opt.step() into the branch without the scaler"
)
DELETE = "scaler.step(opt) already steps the optimizer: delete opt.step()"
PAST_BOTH = (
    "write scaler.step(opt) in the branch that scales the loss, and move opt.step() into the other"
)
CLIPPED_BOTH = "call scaler.unscale_(opt) in the branch that scales the loss, after its backward"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
STEP_IN_BOTH = "if use_amp:\n    scaler.step(opt)\n    scaler.update()\nelse:\n    opt.step()"

CASES = [  # what stands in the loop, where the line that is told ends in `# !`, and the advice
    (f"if use_amp:\n    {WHOLE}\nelse:\n    model(x).backward()\nopt.step()  # !", MOVE),
    (f"if fast:\n    {WHOLE}\nelse:\n    model(x).backward()\nopt.step()  # !", MOVE),
    (f"if not use_amp:\n    model(x).backward()\nelse:\n    {WHOLE}\nopt.step()  # !", MOVE),
    (f"if fast:\n    {WHOLE}\nelse:\n    backward_in_fp32(x)\nopt.step()  # !", MOVE),
    (f"if not use_amp: model(x).backward()\nif use_amp:\n    {WHOLE}\nopt.step()  # !", MOVE),
    (f"{SCALED}\nif use_amp:\n    scaler.step(opt)\n    scaler.update()\nopt.step()  # !", MOVE),
    (
        f"if use_amp:\n    {WHOLE}\nelse:\n    model(x).backward()\nif i % 2: opt.step()  # !",
        MOVE,
    ),
    (
        f"if cuda:\n    {WHOLE}\nelif cpu:\n    model(x).backward()\nelse:\n    pass\n"
        "opt.step()  # !",
        MOVE,
    ),
    (
        f"if use_amp:\n    {SCALED}\n    scaler.step(opt)\nelse:\n    model(x).backward()\n"
        "opt.step()  # !\nscaler.update()",
        MOVE,
    ),
    (f"{SCALED}\nscaler.step(opt)\nopt.step()  # !\nscaler.update()", DELETE),
    (f"if use_amp:\n    {WHOLE}\n    opt.step()  # !\nelse:\n    model(x).backward()", DELETE),
    (
        f"{SCALED}\nif i % 4 == 3:\n    scaler.step(opt)\n    scaler.update()\nopt.step()  # !",
        DELETE,
    ),
    (f"if ready:\n    {WHOLE}\nopt.step()  # !", DELETE),
    (f"if use_amp:\n    {SCALED}\nelse:\n    model(x).backward()\nopt.step()  # !", PAST_BOTH),
    (f"if not use_amp: model(x).backward()\nif use_amp: {SCALED}\nopt.step()  # !", PAST_BOTH),
    (f"{SCALED}\nopt.step()  # !", "skip inf and NaN gradients, and unscale them: write scaler."),
    (
        f"if use_amp:\n    {SCALED}\nelse:\n    model(x).backward()\n{CLIP}  # !\n{STEP_IN_BOTH}",
        CLIPPED_BOTH,
    ),
    (f"{SCALED}\n{CLIP}  # !\nscaler.step(opt)\nscaler.update()", "scaler.unscale_(opt) before"),
]
RIGHT = [
    f"if use_amp:\n    {WHOLE}\nelse:\n    model(x).backward()\n    opt.step()",
    f"if use_amp:\n    {WHOLE}\nelse:\n    model(x).backward()\nif not use_amp: opt.step()",
    f"if use_amp:\n    {WHOLE}\n    continue\nmodel(x).backward()\nopt.step()",
]


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(("body", "advice"), CASES)
def test_the_advice_fits_each_branch(body, advice):
    code = code_of(body)
    compile(code, "wrong", "exec")
    (line,) = [n for n, text in enumerate(code.splitlines(), 1) if text.endswith("# !")]
    ((at, message),) = [(f.line, f.message) for f in migrate_source(code)[1]]
    assert at == line
    assert advice in message


@pytest.mark.parametrize("body", RIGHT)
def test_a_step_in_each_branch_is_right(body):
    compile(code_of(body), "right", "exec")
    assert migrate_source(code_of(body))[1] == []
