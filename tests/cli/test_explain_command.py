"""`amp-lab explain`: from an argument, a file and stdin; and what people do wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MESSAGE = "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float"
TRACEBACK = f"""Traceback (most recent call last):
  File "/home/me/train.py", line 42, in step
    loss = criterion(model(x), y)
  File "/x/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
{MESSAGE}
"""


def explain(*arguments: str, given: str | bytes = "") -> subprocess.CompletedProcess:
    data = given if isinstance(given, bytes) else given.encode()
    command = [sys.executable, "-m", "amp_lab", "explain", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in done.stderr
    return done


def test_an_argument_a_file_and_stdin_give_the_same(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(TRACEBACK)
    answers = [explain(TRACEBACK), explain(str(file)), explain(given=TRACEBACK)]
    answers.append(explain("-", given=TRACEBACK))
    assert {answer.returncode for answer in answers} == {0}
    assert len({answer.stdout for answer in answers}) == 1
    shown = answers[0].stdout
    assert shown.startswith("AMP0018  ")
    for part in (
        "  Why ",
        "  The fix ",
        "  Your line /home/me/train.py:42, in step: loss =",
        "  More ",
    ):
        assert part in shown


def test_a_message_need_not_be_quoted():
    assert explain(*MESSAGE.split()).stdout.startswith("AMP0018")


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "when_it_breaks.md").read_text()
    message = re.search(r'amp-lab explain "(.+)"', page).group(1)
    shown = re.search(r"```text\n(AMP0018.+?)```", page, re.DOTALL).group(1)
    assert explain(message).stdout.startswith(shown)


def test_the_description_in_notebook_08_is_known():
    notebook = (Path(__file__).parents[2] / "notebooks" / "08_when_amp_breaks.py").read_text()
    (description,) = re.findall(r'# pdm run amp-lab explain "(.+)"', notebook)
    assert explain(description).stdout.startswith("AMP0002")


def test_json_has_all_of_it():
    data = json.loads(explain("--json", TRACEBACK).stdout)
    assert data["failures"][0]["code"] == "AMP0018"
    assert data["own_line"]["line"] == 42
    unknown = explain("--json", "KeyError: 'labels'")
    assert (unknown.returncode, json.loads(unknown.stdout)["failures"]) == (1, [])


@pytest.mark.parametrize(
    "text", ["KeyError: 'labels'", "hello", "numpy.linalg.LinAlgError: Singular"]
)
def test_another_librarys_message_is_unknown_in_one_line(text):
    done = explain(text)
    assert done.returncode == 1
    assert done.stdout.startswith("Unknown: ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("given", [b"", b"\n \n", bytes(range(256)) * 10])
def test_nothing_and_binary_are_refused_in_one_line(given):
    done = explain(given=given)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_a_file_of_5_gb_is_read_from_its_end(tmp_path):
    file = tmp_path / "huge.log"
    with file.open("wb") as out:  # sparse: it takes no space on most file systems
        out.seek(5 * 2**30)
        out.write(b"\n" * 2**20 + TRACEBACK.encode())
    done = explain(str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("AMP0018")


@pytest.mark.slow
def test_a_long_pipe_is_read_to_its_end():
    command = [sys.executable, "-m", "amp_lab", "explain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(100):
            process.stdin.write(b"step 1 loss 0.5\n" * 2**16)  # 1 MiB
        process.stdin.write(TRACEBACK.encode())
        process.stdin.close()
        shown = process.stdout.read().decode()
    assert process.returncode == 0
    assert shown.startswith("AMP0018")


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "amp_lab", "explain", MESSAGE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_it_opens_no_connection():
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise OSError('a connection')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from amp_lab.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for text in (MESSAGE, "no faster than fp32"):
        command = [sys.executable, "-c", program, "explain", text]
        done = subprocess.run(command, capture_output=True, timeout=60, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("AMP0")
