"""Paths that unscale or step, and skip the update: each wrong example raises, and says why.

The examples run: each wrong one has to raise the error that is announced, at the line that ends in
a comment `# !`, and each right one has to reach its end.
"""

import re

import pytest
from remedy_tests import says
from scaler_programs import HEAD, found, run

from amp_lab.migrate import migrate_source

LOOP = """
for i in range(4):
    optimizer.zero_grad()
    scaler.scale(new_loss()).backward()
{inside}
"""
ALREADY = "unscale_() has already been called on this optimizer since the last update()"
AFTER_STEP = "unscale_() is being called after step()"
STEPPED = "step() has already been called since the last update()"
UNSCALE = "scaler.unscale_(optimizer)  # !"
DONE = "scaler.step(optimizer)\nscaler.update()"


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def loop(*lines: str, before: str = "") -> str:
    return HEAD + before + LOOP.format(inside=indented("\n".join(lines)))


def accumulated(*lines: str) -> str:
    """The loop, where only the code in it zeroes gradients."""
    return loop(*lines).replace("    optimizer.zero_grad()\n    scaler.scale", "    scaler.scale")


STEP_FUNCTION = """
def train_step(ok):
    scaler.scale(new_loss()).backward()
    scaler.unscale_(optimizer)  # !
    if not ok:
        optimizer.zero_grad()
        {skipped}return None
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return 0


for i in range(4):
    train_step(False)
"""
OK = "norm = clip_grad_norm_(model.parameters(), 1.0)\nok = bool(norm > 1e9)"
WRONG = {
    "not ok": (
        accumulated(UNSCALE, OK, "if not ok:\n    optimizer.zero_grad()\n    continue", DONE),
        ALREADY,
    ),
    "an else that zeroes": (
        accumulated(UNSCALE, OK, f"if ok:\n{indented(DONE)}\nelse:\n    optimizer.zero_grad()"),
        ALREADY,
    ),
    "no zero_grad, by its condition": (
        accumulated(UNSCALE, OK, "if not norm.isfinite() or not ok:\n    continue", DONE),
        ALREADY,
    ),
    "zeroed in each turn": (
        loop(UNSCALE, OK, "if i < 9:\n    continue", DONE),
        ALREADY,
    ),
    "only where it is finite": (
        loop(UNSCALE, OK, f"if torch.isinf(norm):\n{indented(DONE)}"),
        ALREADY,
    ),
    "gradients set to None": (
        accumulated(
            UNSCALE,
            OK,
            "if not ok:\n    for p in model.parameters(): p.grad = None\n    continue",
            DONE,
        ),
        ALREADY,
    ),
    "an error that is caught": (
        accumulated(
            UNSCALE,
            "try:\n    raise RuntimeError\nexcept RuntimeError:\n    continue",
            DONE,
        ),
        ALREADY,
    ),
    "a step, and no update": (
        loop(UNSCALE, OK, "scaler.step(optimizer)", "if not ok:\n    continue", "scaler.update()"),
        AFTER_STEP,
    ),
    "an update now and then": (
        loop(UNSCALE, "scaler.step(optimizer)", "if i % 3 == 2:\n    scaler.update()"),
        AFTER_STEP,
    ),
    "a step without unscale_": (
        loop("scaler.step(optimizer)  # !", "if i < 9:\n    continue", "scaler.update()"),
        STEPPED,
    ),
    "a step without unscale_, and an update now and then": (
        loop("scaler.step(optimizer)  # !", "if i % 3 == 2:\n    scaler.update()"),
        STEPPED,
    ),
    "a function that returns": (HEAD + STEP_FUNCTION.format(skipped=""), ALREADY),
}
UPDATED = "scaler.update()\n        "
UNSCALED = "scaler.unscale_(optimizer)"
SKIPPED_WITH_UPDATE = "if not ok:\n    optimizer.zero_grad()\n    scaler.update()\n    continue"
RIGHT = {
    "not ok": accumulated(UNSCALED, OK, SKIPPED_WITH_UPDATE, DONE),
    "before the branch": accumulated(
        UNSCALED, OK, "if ok:\n    scaler.step(optimizer)\nscaler.update()", "if ok:\n    continue"
    ),
    "an else that updates": loop(
        UNSCALED, OK, f"if ok:\n{indented(DONE)}\nelse:\n    scaler.update()"
    ),
    "skipped before unscale_": loop("if i == 1:\n    continue", UNSCALED, DONE),
    "left for good": loop(UNSCALED, OK, "if not ok:\n    break", DONE),
    "a new scaler": loop(
        UNSCALED, OK, "if not ok:\n    scaler = GradScaler('cpu')\n    continue", DONE
    ),
    "a scaler that is off": loop(
        UNSCALED,
        OK,
        "if not ok:\n    continue",
        DONE,
        before='scaler = GradScaler("cpu", enabled=False)\n',
    ).replace('scaler = GradScaler("cpu", init_scale=2.0**10)\n', ""),
    "handed on": loop(
        UNSCALED,
        OK,
        "if not ok:\n    finish(scaler)\n    continue",
        DONE,
        before="def finish(s):\n    s.update()\n\n",
    ),
    "a function that updates": HEAD + STEP_FUNCTION.format(skipped=UPDATED).replace("  # !", ""),
    "a function that is called once": HEAD
    + STEP_FUNCTION.format(skipped="")
    .replace("  # !", "")
    .replace("range(4)", "(1,)")
    .replace("for i in (1,):\n    train_step", "train_step"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_that_is_announced_is_the_one_that_is_raised(name):
    code, error = WRONG[name]
    (finding,) = [f for f in migrate_source(code)[1] if f.kind == "mistake"]
    (line,) = [n for n, text in enumerate(code.splitlines(), 1) if text.endswith("# !")]
    assert finding.line == line
    assert f'raises "{error}"' in finding.message
    assert says("migrate.path_without_update", finding.message)
    assert "call scaler.update()" in finding.message
    with pytest.raises(RuntimeError, match=re.escape(error)):
        run(code)


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_runs_and_gives_no_alarm(name):
    run(RIGHT[name])
    assert found(RIGHT[name]) == ""


def test_the_line_of_the_path_is_that_of_its_branch():
    code, _ = WRONG["not ok"]
    (line,) = [n for n, text in enumerate(code.splitlines(), 1) if text.strip() == "continue"]
    assert f"on the path of line {line}" in found(code)
    code, _ = WRONG["an else that zeroes"]
    (line,) = [n for n, text in enumerate(code.splitlines(), 1) if text.strip() == "if ok:"]
    assert f"on the path of line {line}" in found(code)


def test_gradients_that_are_summed_over_batches_keep_their_own_message():
    every = f"if i % 2:\n{indented(DONE)}\n    optimizer.zero_grad()"
    said = found(accumulated("scaler.unscale_(optimizer)", every))
    assert "unscale_ runs for each batch" in said
    assert "update() follows" not in said
