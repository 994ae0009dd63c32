"""Whatever is typed, and whatever lies in the files: one line, exit code 2, and nothing lost.

hypothesis makes up the command lines: some hundred daily, always the same ones; weekly thousands.
"""

import contextlib
import json
import os
import signal
import stat
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from amp_lab import save_checkpoint
from amp_lab.cli import COMMANDS, main
from conftest import WEEKLY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="pipes, links and signals of POSIX"),
]

LIMIT_S = 60  # of one command, after which it is taken to hang
EXAMPLES = 1_000 if WEEKLY else 60  # of each command

MODEL = """
import os, sys
import torch
from torch import nn

def linear(): return nn.Linear(3, 2)
def raises(): raise RuntimeError("one\\ntwo")
def base(): raise type("Base", (BaseException,), {})("x")
def exits(): sys.exit(3)
def ends(): os._exit(3)
def prints():
    print("{")
    os.write(1, b"{")
    return linear()
def closes():
    sys.stdout.close()
    os.close(1)
    return linear()
def number(): return 3
def none(): return None
def parts(): return (linear(), torch.zeros(2, 3), {"x": 1}, 4)
def loss(output): return output.sum()
def vector(output): return output
nan = float("nan")
class Wrong(nn.Module):
    def forward(self, x): return x @ x
class Deep(nn.Module):
    def forward(self, x): return self.forward(x)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of what nobody expects, which is the current one while a test runs."""
    place = tmp_path_factory.mktemp("hostile")
    texts = {
        "model.py": MODEL,
        "old.py": "from torch.cuda.amp import autocast\nautocast()\n",
        "broken.py": "def f(:\n",
        "nested.py": f"x = {'(' * 5000}1{')' * 5000}\n",
        "chained.py": "from torch.cuda.amp import autocast\nx = a" + ".b" * 20_000 + "\n",
        "sum.py": "from torch.cuda.amp import autocast\nx = " + "1 + " * 20_000 + "1\n",
        "rot13.py": "# coding: rot13\nsebz gbepu.phqn.nzc vzcbeg nhgbpnfg\n",
        "idna.py": "# coding: idna\nfrom torch.cuda.amp import autocast\n",
        "empty.json": "",
        "deep.json": "[" * 100_000,
        "nan.json": '{"schema": "amp-lab bench 2", "rows": NaN}',
        "other.json": json.dumps({"schema": "amp-lab bench 2", "rows": [3], "trusted": "yes"}),
        "list.json": "[1, 2]",
        "magics.ipynb": json.dumps(
            {"cells": [{"cell_type": "code", "source": ["%%bash\n", "ls"]}]}
        ),
        "no\nline.py": "import torch\n",
        "thesis.tex": "all of it",
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    (place / "bytes.py").write_bytes(bytes(range(256)))
    with zipfile.ZipFile(place / "zip.pt", "w") as archive:
        archive.writestr("a", "b")
    save_checkpoint(place / "other.pt", anything=3)
    (place / "folder").mkdir()
    (place / "run").mkdir()
    (place / "run" / "config.json").write_text('{"config": {"epochs": []}, "images": 1}')
    (place / "checkpointed").mkdir()
    (place / "checkpointed" / "checkpoint.pt").write_bytes((place / "other.pt").read_bytes())
    os.mkfifo(place / "pipe.json")
    (place / "link.json").symlink_to(place / "thesis.tex")
    (place / "loop.py").symlink_to(place / "loop.py")
    (place / "device.py").symlink_to("/dev/zero")
    return place


# No separators, so that nothing reaches beyond the folder.
WORDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/\\"), max_size=20
).filter(lambda text: text not in (".", "..", "~"))
ODD_NUMBERS = "0 -1 1 2 007 1e400 -1e400 nan inf -inf 1e-320 9223372036854775808 0x10 1_000 1.5 3,4"
NUMBERS = st.sampled_from(ODD_NUMBERS.split()) | st.integers().map(str) | st.floats().map(str)
NAMES = (
    "model.py old.py broken.py nested.py chained.py sum.py rot13.py idna.py bytes.py deep.json "
    "empty.json nan.json other.json list.json magics.ipynb thesis.tex zip.pt other.pt folder run "
    "checkpointed pipe.json link.json loop.py device.py none.py"
)
FILES = st.sampled_from([*NAMES.split(), "no\nline.py", "a" * 300, ""])
CALLABLES = "linear raises base exits ends prints closes number none parts nan Wrong Deep nothing"
TARGETS = st.sampled_from(CALLABLES.split()).map("model.py:{}".format) | st.sampled_from(
    ["broken.py:x", "bytes.py:x", "nested.py:x", "device.py:x", "json:loads", "os:_exit", "model:",
     "torch.nn:Linear", "torch.nn:ReLU", "no.such:x", ":", "", "sys:exit", "builtins:input"]
)  # fmt: skip
INPUTS = st.sampled_from(
    ["2,3", "bool:2,3", "int64:2,3", "int64:2,3<9", "complex64:2,3", "x=2,3", "input=2,3", "2,4",
     "0", "-1,3", "1," * 5000 + "1", "9" * 40, "float8:2", "uint8:2,3<999", ":", "=", "<", ""]
)  # fmt: skip
ANYTHING = WORDS | NUMBERS | FILES


def flat(parts: object) -> list[str]:
    return [parts] if isinstance(parts, str) else [text for part in parts for text in flat(part)]


def options(**values: st.SearchStrategy) -> st.SearchStrategy[list[str]]:
    """Some of these options, in any order, with a value each, or none for a flag."""

    def one(name: str, value: st.SearchStrategy) -> st.SearchStrategy[list[str]]:
        return value.map(lambda v: [f"--{name.replace('_', '-')}", *([] if v is True else [v])])

    each = [one(name, value) for name, value in values.items()]
    return st.lists(st.one_of(each), max_size=4).map(flat)


FLAG = st.just(True)
FORMS = st.sampled_from(["json", "markdown", "table", "xml"])
OF_MODEL = {
    "input": INPUTS, "with": WORDS, "batch": TARGETS, "loss": TARGETS | st.just(".x"),
    "eval": FLAG, "format": FORMS, "device": ANYTHING | st.sampled_from(["cpu", "cuda"]),
}  # fmt: skip
RIGHT_INPUT = st.sampled_from([[], ["--input", "2,3"]])
LINES = {
    "doctor": options(device=ANYTHING),
    "ops": options(device=ANYTHING, dtype=ANYTHING, against=ANYTHING, format=FORMS),
    "xray": st.tuples(
        TARGETS | ANYTHING, RIGHT_INPUT,
        options(**OF_MODEL, dtype=ANYTHING, real=FLAG, parallel=st.sampled_from(["ddp", "fsdp"]),
                precision=WORDS, depth=NUMBERS),
    ),
    "memory": st.tuples(
        TARGETS | ANYTHING, RIGHT_INPUT,
        options(**OF_MODEL, memory=ANYTHING, reserve=NUMBERS, precision=WORDS, optimizer=WORDS,
                tokens=NUMBERS),
    ),
    "diff": st.tuples(
        TARGETS | ANYTHING, RIGHT_INPUT,
        options(**OF_MODEL, precision=ANYTHING, batch_sizes=ANYTHING, figure=FILES),
    ),
    "rehearse": st.tuples(
        TARGETS | ANYTHING, RIGHT_INPUT,
        options(**{k: v for k, v in OF_MODEL.items() if k != "device"}, formats=ANYTHING,
                steps=st.sampled_from(["0", "-1", "1e3", "x", ""]), seeds=NUMBERS,
                figure=FILES, **{"for": ANYTHING}),
    ),
    "advise": st.tuples(
        TARGETS | ANYTHING,
        options(**OF_MODEL, minutes=st.sampled_from(["0", "nan", "-1", "1e400", "x"]), html=FILES),
        st.just(["--minutes", "nan"]),  # or a right line would take a minute
    ),
    "bench": st.tuples(
        options(workload=WORDS, precision=ANYTHING, rung=WORDS, rounds=NUMBERS, out=FILES,
                results=FILES, compare=FILES, format=FORMS, quick=FLAG),
        st.just(["--workload", "no such"]),
    ),
    "train": st.tuples(
        options(out=FILES, resume=FLAG, dataset=ANYTHING, model=ANYTHING, precision=ANYTHING,
                batch_size=NUMBERS, epochs=NUMBERS, lr=NUMBERS, seed=NUMBERS, image_size=NUMBERS,
                context=NUMBERS,
                accumulate=NUMBERS, clip_norm=NUMBERS, workers=NUMBERS, data=FILES,
                device=ANYTHING, parallel=ANYTHING, timeout=NUMBERS, checkpoint_every=NUMBERS),
        st.just(["--out", "run"]),  # which cannot go on
    ),
    "sample": st.tuples(
        FILES,
        options(prompt=ANYTHING, tokens=NUMBERS, temperature=NUMBERS, seed=NUMBERS,
                precision=ANYTHING, device=ANYTHING),
    ),
    "export": st.tuples(FILES, FILES, options(force=FLAG, dtype=ANYTHING, data=FILES)),
    "migrate": st.tuples(FILES.filter(bool), options(check=FLAG)),
    "explain": st.tuples(ANYTHING, options(json=FLAG)),
}  # fmt: skip


@contextlib.contextmanager
def within(seconds: int):
    """The block that is an error if it takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def content(folder: Path) -> dict[str, object]:
    """What is in the files, but for the lock that a run makes."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.name != ".lock" and "__pycache__" not in path.parts:
            mode = path.lstat().st_mode
            found[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else mode
    return found


def test_every_command_is_tried():
    commands = [command for group in COMMANDS.values() for command in group]
    assert {command.__name__.rpartition(".")[2] for command in commands} == LINES.keys()


@pytest.mark.parametrize("command", LINES)
def test_what_is_wrong_is_a_line_and_nothing_is_lost(command, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    before = content(folder)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not WEEKLY,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(LINES[command])
    def check(parts):
        line = [command, *flat(parts)]
        if "--format" in line and command not in ("migrate", "bench"):
            line += ["--format", "json"]  # the last one counts
        assume(not any(text.startswith(("-h", "--h")) for text in line))  # help is no mistake
        capfd.readouterr()
        with within(LIMIT_S):
            try:
                code = main(line)
            except SystemExit as error:  # of the parser
                code = error.code
        said = capfd.readouterr()
        assert code in (0, 1, 2), (line, said)
        assert code != 1 or "--check" in line or command == "explain", (line, said)
        assert "Traceback" not in said.out + said.err, (line, said)
        if code == 2:
            assert len(said.err.splitlines()) == 1, (line, said)
            assert said.err.startswith("amp-lab"), (line, said)
        elif command not in ("migrate", "bench") and line[-2:] == ["--format", "json"]:
            json.loads(said.out, parse_constant=pytest.fail)

    check()
    assert content(folder) == before
