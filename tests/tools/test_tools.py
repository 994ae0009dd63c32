"""`pdm run lab` and `pdm run notebooks`, given something wrong."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import nbformat
import pytest
from cases import some_of
from rank_processes import free_port

import build_pairs
import lab
from amp_lab.core import timing

pytestmark = pytest.mark.slow

ROOT = Path(build_pairs.__file__).resolve().parent.parent
HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

"""


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def run_lab(*arguments: str, **settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "lab.py", *arguments]
    return subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for notebooks, with the project's jupytext settings above it."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(build_pairs, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(build_pairs, "busy_reason", lambda: "")  # whatever else runs here
    return tmp_path / "notebooks"


def test_a_taken_port_is_said_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run_lab(f"--port={port}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("port", ["0", "65536", "-1", "eight", ""])
def test_a_wrong_port_is_said(port):
    assert re.match(f"--port {port}: .* 1 to 65535$", lab.port_problem("127.0.0.1", port))


def test_a_wrong_address_is_said():
    assert lab.port_problem("nowhere.invalid", "8888").startswith("--ip nowhere.invalid: ")
    assert lab.port_problem("", "8888").startswith("--ip needs an address")


@pytest.mark.parametrize("ip", ["*", "0.0.0.0", "localhost"])
def test_addresses_that_jupyter_takes_are_taken(ip):
    assert lab.port_problem(ip, str(free_port())) is None


@pytest.mark.parametrize(
    ("arguments", "environment", "empty"),
    [
        ([], "", "JUPYTER_TOKEN"),
        (["--IdentityProvider.token="], "x", "--IdentityProvider.token="),
        (["--ServerApp.token=''"], None, "--ServerApp.token=''"),
    ],
)
def test_an_empty_token_is_refused(monkeypatch, arguments, environment, empty):
    if environment is None:
        monkeypatch.delenv("JUPYTER_TOKEN", raising=False)
    else:
        monkeypatch.setenv("JUPYTER_TOKEN", environment)
    assert lab.token_problem(arguments).startswith(f"{empty} is empty")
    monkeypatch.setenv("JUPYTER_TOKEN", "secret")
    assert lab.token_problem(["--IdentityProvider.token=secret"]) is None


@pytest.mark.parametrize("how", some_of("two arguments", "a file", "a settings file"))
def test_a_server_without_a_token_never_starts(tmp_path, how):
    """In whichever way the token became empty: what the server is set to counts."""
    arguments, settings = [f"--port={free_port()}", "--no-browser"], {"HOME": str(tmp_path)}
    if how == "a file":
        (tmp_path / "token").write_text("")
        settings["JUPYTER_TOKEN_FILE"] = str(tmp_path / "token")
    elif how == "two arguments":
        arguments += ["--IdentityProvider.token", ""]
    else:
        (tmp_path / "jupyter_server_config.py").write_text("c.IdentityProvider.token = ''\n")
        settings["JUPYTER_CONFIG_DIR"] = str(tmp_path)
    done = run_lab(*arguments, **settings)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("lab: the token is empty")


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    said = lab.folder_problem(tmp_path / "missing")
    assert said is not None
    assert lab.folder_problem(tmp_path) is None


def test_lab_starts_and_answers(tmp_path):
    port = free_port()
    command = [sys.executable, ROOT / "tools" / "lab.py", f"--port={port}", "--no-browser"]
    home = {"HOME": str(tmp_path), "JUPYTER_TOKEN": "secret"}
    address = f"http://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | home, **quiet) as server:
        try:
            while not answers(port):
                assert server.poll() is None
                time.sleep(0.2)
            contents = f"{address}/api/contents/notebooks?token=secret"
            names = [entry["name"] for entry in json.load(urlopen(contents))["content"]]
            assert "01_number_formats.ipynb" in names
            with pytest.raises(HTTPError, match="403"):
                urlopen(f"{address}/api/contents/notebooks")
            status = json.load(urlopen(f"{address}/lsp/status?token=secret"))
            assert status["sessions"] == {}  # no language server is started beside a notebook
        finally:
            server.terminate()


def test_a_free_port_is_no_problem():
    assert lab.port_problem("127.0.0.1", str(free_port())) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AMP_LAB_DEVICE", "banana", "is not a device"),
        ("AMP_LAB_DEVICE", "xpu", "is not available"),
        ("AMP_LAB_SCALE", "huge", "is not a scale"),
    ],
)
def test_lab_refuses_a_wrong_setting_before_it_starts(monkeypatch, capsys, name, value, said):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(lab, "port_problem", lambda ip, port: None)
    assert lab.main([]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert f"{name}='{value}' {said}" in printed


def test_a_notebook_that_fails_is_named_with_its_line_and_its_pair_is_kept(folder, capsys):
    source = folder / "01_broken.py"
    source.write_text(HEADER + "# %%\nx = 1\n\n# %%\nx / 0\n\n# %%\nprint(x)\n")
    source.with_suffix(".ipynb").write_text("as it was")
    assert build_pairs.main([]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"01_broken\.py: cell 2 \(line 13\) .*ZeroDivisionError", said)
    assert source.with_suffix(".ipynb").read_text() == "as it was"


def test_nothing_is_made_on_a_busy_machine_unless_forced(folder, monkeypatch, capsys):
    source = folder / "01_sound.py"
    source.write_text(HEADER + "# %%\n1 + 1\n")
    monkeypatch.setattr(build_pairs, "busy_reason", lambda: "busy in 9 of 12 rounds")
    assert build_pairs.main([]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search(r"01_sound\.py: .*\(busy in 9 of 12", said)
    assert not source.with_suffix(".ipynb").exists()
    assert build_pairs.main(["--force"]) == 0
    assert source.with_suffix(".ipynb").exists()


def test_a_machine_that_becomes_busy_is_given_a_second_chance(folder, capsys):
    """The first run prints that it is not to be trusted, the second does not; a third always."""
    count = folder / "count"
    source = folder / "01_timed.py"
    code = f"from pathlib import Path\ncount = Path({str(count)!r})\n"
    code += "old = count.read_text() if count.exists() else ''\n_ = count.write_text(old + 'x')\n"
    code += "print('not trusted: the machine was busy' if len(old) != 1 else 'quiet')\n"
    source.write_text(HEADER + "# %%\n" + code)
    assert build_pairs.main([]) == 0
    pair = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert pair.cells[0].outputs[0].text == "quiet\n"
    assert build_pairs.main([]) == 2
    assert "printed 'not trusted: " in capsys.readouterr().err


def test_a_damaged_pair_is_named(folder, capsys):
    source = folder / "01_sound.py"
    source.write_text(HEADER + "# %%\n1 + 1\n")
    source.with_suffix(".ipynb").write_text("<<<<<<< HEAD\n{}\n")
    assert build_pairs.main(["--check"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "01_sound.ipynb is damaged" in said


def git(folder, *arguments):
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git")
def test_a_pair_is_made_from_a_commit_alone(folder, capsys):
    source = folder / "01_sound.py"
    source.write_text(HEADER + '# %%\nprint("a machine, commit 0123abc")\n')
    git(folder.parent, "init")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-m", "Add a notebook")
    source.write_text(source.read_text().replace("0123abc", "0123abc+"))
    assert build_pairs.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "notebooks/01_sound.py is changed" in line
    git(folder.parent, "commit", "-a", "-m", "Change it")
    assert build_pairs.main([]) == 0
    capsys.readouterr()
    assert build_pairs.main(["--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"01_sound\.ipynb .*in no commit .*0123abc\+", line)


def test_a_notebook_without_a_header_is_given_one(folder, capsys):
    source = folder / "20_plain.py"
    source.write_text("# %%\n1 + 1\n")
    assert build_pairs.main(["--check"]) == 2
    said = capsys.readouterr().err
    assert "20_plain.py has no pair" in said
    assert "pdm run notebooks 20_plain" in said
    assert build_pairs.main(["20"]) == 0
    assert "20_plain.py: added the header" in capsys.readouterr().out
    assert source.read_text() == HEADER.replace("Python 3\n", "Python 3 (ipykernel)\n") + (
        "# %%\n1 + 1\n"
    )
    assert build_pairs.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# ---\n# jupyter:\n#   jupytext:\n#     formats: ipynb,py\n# ---\n\n# %%\n1\n",
            "line 3: ",
        ),
        (HEADER + "# %% [md]\n# A text.\n", "line 9: should be '# %% [markdown]'"),
    ],
)
def test_what_no_pair_can_match_is_told_before_it_is_run(folder, capsys, text, said):
    (folder / "20_odd.py").write_text(text)
    assert build_pairs.main(["20"]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert f"20_odd.py, {said}" in printed
    assert not (folder / "20_odd.ipynb").exists()


def test_a_new_notebook_is_made_and_what_to_do_next_is_said(folder, capsys):
    assert build_pairs.main(["--new", "07_fused_optimizers"]) == 0
    said = capsys.readouterr().out
    assert "pdm run notebooks 07" in said
    assert "README.md" in said
    text = (folder / "07_fused_optimizers.py").read_text()
    assert "# # Measure fused optimizers\n" in text
    assert "{" not in text.partition("# %%\n")[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("20", "'20' is no name"),
        ("title", "'title' is no name"),
        ("20_Title", "'20_Title' is no name"),
        ("20_two words", "'20_two words' is no name"),
        ("../20_title", "'../20_title' is no name"),
        ("", "'' is no name"),
        ("07_other", "07 is taken by 07_title"),
        ("07_title", "07 is taken by 07_title"),
    ],
)
def test_a_new_notebook_of_a_wrong_name_is_refused_in_one_line(folder, capsys, name, said):
    (folder / "07_title.py").write_text("as it was")
    assert build_pairs.main(["--new", name]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert said in printed
    assert [path.read_text() for path in folder.iterdir()] == ["as it was"]


def test_what_depends_on_another_machine_is_kept_where_its_code_did_not_change(folder, capsys):
    source, tag = folder / "01_sound.py", f'# %% tags=["{build_pairs.IGNORED}"]\n'
    cells = [f"{tag}3 * 3\n", f"{tag}2 * 2\n", "# %%\n5 * 5\n"]
    source.write_text("\n".join([HEADER + "# %% [markdown]\n# # Add\n", *cells]))
    assert build_pairs.main(["--keep"]) == 2
    assert re.search(r"01_sound\.py .*no pair, .*kept", capsys.readouterr().err)
    assert build_pairs.main([]) == 0
    pair = source.with_suffix(".ipynb")
    pair.write_text(pair.read_text().replace('"9"', '"of the other machine"'))
    pair.write_text(pair.read_text().replace('"25"', '"wrong"'))
    source.write_text(source.read_text().replace("2 * 2", "2 * 4"))
    assert build_pairs.main(["--keep"]) == 0
    found = [cell.outputs[0].data["text/plain"] for cell in nbformat.read(pair, 4).cells[1:]]
    assert found == ["of the other machine", "8", "25"]
    assert build_pairs.main([]) == 0
    assert "of the other machine" not in pair.read_text()


def test_new_text_leaves_the_bytes_of_a_figure(folder):
    source = folder / "01_sound.py"
    channel = "Image.effect_noise((64, 64), 90).point(lambda value: value // 40 * 40)"
    figure = f'from PIL import Image\n\nImage.merge("RGB", [{channel} for _ in range(3)])\n'
    source.write_text(f"{HEADER}# %% [markdown]\n# # Draw\n\n# %%\n{figure}")
    assert build_pairs.main([]) == 0
    pair = source.with_suffix(".ipynb")
    drawn = build_pairs.figures(nbformat.read(pair, as_version=4))
    source.write_text(source.read_text().replace("# # Draw", "# # Draw noise"))
    assert build_pairs.main(["--text"]) == 0
    assert build_pairs.figures(nbformat.read(pair, as_version=4)) == drawn


def test_new_text_needs_no_run_and_new_code_does(folder, capsys):
    source = folder / "01_sound.py"
    source.write_text(HEADER + "# %% [markdown]\n# # Add\n\n# %%\n1 + 1\n\n# %%\n1 + 1\n")
    assert build_pairs.main(["--text"]) == 2
    assert re.search(r"01_sound\.py .*no pair, .*kept", capsys.readouterr().err)
    assert build_pairs.main([]) == 0
    pair = source.with_suffix(".ipynb")
    pair.write_text(pair.read_text().replace('"2"', '"as it was"'))  # what no run would print
    source.write_text(source.read_text().replace("# # Add", "# # Add numbers"))
    assert build_pairs.main(["--text"]) == 0
    text, *code = nbformat.read(pair, as_version=4).cells
    assert text.source == "# Add numbers"
    assert [cell.outputs[0].data["text/plain"] for cell in code] == ["as it was"] * 2
    assert build_pairs.main(["--check"]) == 0
    before = pair.read_bytes()
    for other in (source.read_text().replace("1 + 1", "1 + 2"), source.read_text() + "\n# %%\n3\n"):
        source.write_text(other)
        assert build_pairs.main(["--text"]) == 2
        assert "not only its text changed" in capsys.readouterr().err
        assert pair.read_bytes() == before


def test_running_twice_changes_nothing(folder):
    source = folder / "01_sound.py"
    source.write_text(HEADER + "# %% [markdown]\n# # Add\n\n# %%\n1 + 1\n\n# %%\n1 + 1\n")
    assert build_pairs.main([]) == 0
    first = source.with_suffix(".ipynb").read_bytes()
    assert build_pairs.main(["01"]) == 0
    assert source.with_suffix(".ipynb").read_bytes() == first
    pair = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert [cell.outputs[0].data["text/plain"] for cell in pair.cells[1:]] == ["2", "2"]
    nbformat.validate(pair)
    assert build_pairs.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (["99"], {}, "'99'; .*01_sound"),
        (["--check"], {}, "01_sound.py has no pair"),
        (
            [],
            {"AMP_LAB_DEVICE": "banana"},
            "AMP_LAB_DEVICE='banana': .*AMP_LAB_DEVICE=cpu",
        ),
        (
            [],
            {"AMP_LAB_SCALE": "huge"},
            "AMP_LAB_SCALE='huge': .*AMP_LAB_SCALE=quick",
        ),
    ],
)
def test_what_notebooks_is_told_wrongly_is_said_in_one_line(
    folder, monkeypatch, capsys, arguments, settings, said
):
    (folder / "01_sound.py").write_text(HEADER + "# %%\n1 + 1\n")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert build_pairs.main(arguments) == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_readme_shows_the_figure_of_notebook_04():
    pair = nbformat.read(build_pairs.README_FIGURE.with_suffix(".ipynb"), as_version=4)
    assert build_pairs.figures(pair)[-1] == build_pairs.README_FIGURE.read_bytes()
    assert str(build_pairs.README_FIGURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()


def test_the_readme_maps_every_notebook():
    readme = (ROOT / "README.md").read_text()
    for source in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        assert re.search(rf"\]\(notebooks/{source.stem}\.ipynb\)", readme), (
            f"add a row with a link to notebooks/{source.stem}.ipynb to the map in README.md"
        )


def test_what_the_readme_links_to_is_there():
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_lock_names_no_addresses():
    lock = tomllib.loads((ROOT / "pdm.lock").read_text())
    for package in lock["package"]:
        package.pop("summary", None)  # in which its author may name one
    assert "://" not in str(lock)


def test_a_machine_that_is_watched_is_quiet_or_says_why_not(monkeypatch):
    monkeypatch.setattr(timing, "_waited_s", lambda: 0.0)
    monkeypatch.setattr(timing, "_stolen_s", lambda: 0.0)
    monkeypatch.setattr(timing, "_time_calls", lambda fn, calls, device: 1e-3)
    assert build_pairs.busy_reason(seconds=0.01) == ""
    monkeypatch.setattr(timing, "_waited_s", time.perf_counter)  # its threads wait all the time
    assert "the machine was busy in" in build_pairs.busy_reason(seconds=0.01)
