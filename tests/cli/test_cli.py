import os
import re
import subprocess
import sys

import pytest
from cases import some_of

from amp_lab.cli import COMMANDS, doctor, main

pytestmark = pytest.mark.slow

NO_TORCH = "import sys; sys.modules['torch'] = None; "  # any `import torch` then fails


def amp_lab(*arguments: str, **settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "amp_lab", *arguments]
    return subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=120
    )


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )


def test_doctor_prints_a_measured_rate_for_each_precision_and_a_recommendation(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for line in ("fp32 ", "tf32 ", "fp16 ", "bf16 "):
        assert any(
            row.startswith(line) and ("FLOP/s" in row or "not available" in row)
            for row in printed.splitlines()
        )
    assert "Use " in printed
    assert "of memory" in printed


def test_after_doctors_line_for_tf32_the_older_names_can_still_be_read():
    """Inductor and Lightning Fabric read them, and would be refused after the newer name is set."""
    lines = "\n".join(doctor._recipe("tf32", "cuda"))
    done = run_python(f"""
import torch
{lines}
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert torch.backends.cudnn.conv.fp32_precision == "tf32"
assert torch.get_float32_matmul_precision() == "high"
assert torch.backends.cuda.matmul.allow_tf32
assert torch.backends.cudnn.allow_tf32
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["dcotor"], "invalid choice: 'dcotor'"),
        (["doctor", "--devise", "cpu"], r"--devise cpu; .*--device\?"),
        (["memory", "a:b", "--budget", "8GiB"], r"--budget 8GiB; .*--memory\?"),
        (["advise", "a:b", "--budget=8GiB"], r"--budget=8GiB; .*--memory\?"),
        (["doctor", "--colour", "red"], r"unrecognized arguments: --colour red \(see"),
        (["doctor", "more"], r"unrecognized arguments: more \(see"),
        (["doctor", "--device"], "expected one argument"),
    ],
)
def test_a_mistyped_command_is_one_line_on_stderr_and_exit_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.search(said, printed.err)


@pytest.mark.parametrize(
    ("arguments", "device", "said"),
    [
        (["doctor", "--device", "nope"], "cpu", "'nope' is not a device"),
        (["doctor", "--device", "xpu"], "cpu", "'xpu' is not available"),
        (["doctor"], "banana", "AMP_LAB_DEVICE='banana' .*a device"),
        (["doctor"], "xpu", "AMP_LAB_DEVICE='xpu' .*not available"),
    ],
)
def test_a_wrong_device_is_one_line_on_stderr_and_exit_2(
    capsys, monkeypatch, arguments, device, said
):
    monkeypatch.setenv("AMP_LAB_DEVICE", device)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.search(said, printed.err)


def test_without_torch_it_says_what_to_do():
    done = run_python(
        NO_TORCH + "import sys; from amp_lab.cli import main; sys.exit(main(['doctor']))"
    )
    assert done.returncode == 2
    assert re.match("amp-lab doctor: torch .*installed", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_the_same_from_the_shell():
    done = amp_lab("doctor", AMP_LAB_DEVICE="banana")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.match("amp-lab doctor: AMP_LAB_DEVICE='banana' .*a device", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_stops_reading_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m amp_lab doctor --device cpu | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_need_no_torch(argument):
    done = run_python(NO_TORCH + f"from amp_lab.cli import main; main(['{argument}'])")
    assert done.returncode == 0, done.stderr
    assert "amp-lab" in done.stdout


def test_help_lists_each_command_once_under_its_question(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            listed[line.removesuffix(":")] = []
        elif re.match(r"  [a-z]", line):
            listed[list(listed)[-1]].append(line.split()[0])
    names = {
        title: [command.__name__.rpartition(".")[2] for command in group]
        for title, group in COMMANDS.items()
    }
    assert listed == names | {"options": []}
    assert names["your machine"] == ["doctor", "bench"]


def test_the_package_alone_loads_nothing():
    done = run_python(
        NO_TORCH
        + "import amp_lab; print(sorted(m for m in sys.modules if m.startswith('amp_lab')))"
    )
    assert done.stdout.strip() == "['amp_lab']", done.stderr


@pytest.mark.parametrize(
    "code",
    some_of(
        "from amp_lab import measure; from amp_lab.core.timing import measure as same",
        "from amp_lab.core.timing import measure as same; from amp_lab import measure",
        "import amp_lab.core.device; from amp_lab import measure; same = measure",
    ),
)
def test_measure_is_the_function_whichever_way_it_is_imported(code):
    done = run_python(f"{code}; assert callable(measure) and measure is same")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    done = run_python(
        "import amp_lab; [getattr(amp_lab, name) for name in amp_lab.__all__]; amp_lab.nothing"
    )
    assert re.search("AttributeError: .*'amp_lab' .*'nothing'", done.stderr)


def test_ipython_shows_a_users_mistake_as_one_line():
    run = 'import amp_lab; amp_lab.pick_device("banana")'
    done = run_python(f"import IPython; IPython.InteractiveShell().run_cell({run!r})")
    assert done.stdout.strip().startswith("DeviceError: 'banana' is not a device")
    assert len(done.stdout.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        ["migrate", "--write", ""],
        ["train", "--out", ""],
        ["export", "", "x.pt"],
        ["bench", "--out", ""],
        ["ops", "--against", ""],
        ["memory", ""],
    ],
    ids=lambda line: line[0],
)
def test_an_empty_text_is_a_mistake(line, tmp_path, monkeypatch, capsys):
    """As a path it would be the working folder, which some of them would change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text("from torch.cuda.amp import autocast\nautocast()\n")
    before = (tmp_path / "old.py").read_text()
    assert main(line) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"amp-lab {line[0]}: the value of")
    assert (tmp_path / "old.py").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["old.py"]
