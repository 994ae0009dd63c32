# @title Set up AMP Lab (run this cell first)
"""Install what the notebook needs into this runtime, and leave the packages that are there.

`tools/edition.py` fills in the three names below and puts this file into the first cell of each
notebook. It reads the version of Python before anything else, so it also has to parse in Python
3.10.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = ""  # its address
COMMIT = ""  # of the package and of `course`
PACKAGES = []  # requirements such as "lunr>=0.8"

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+[\w.]+)?")
NO_NETWORK = "check the network (on Kaggle: Settings > Turn on internet), then run this cell again"
# What pip prints when it fails, and what to do about it.
ADVICE = {
    "conflicting dependencies": "pip would replace a package of this runtime: use a newer runtime",
    r"due to an OSError: \[Errno": "use a virtual environment that you can write to",
    "No module named pip": "install pip with `python -m ensurepip`",
    "": NO_NETWORK,
}


class SetupError(Exception):
    """Something to put right, in one line."""

    def _render_traceback_(self):  # IPython shows these lines instead of a traceback
        return [str(self)]


def check_versions():
    """Raise `SetupError` for a Python or a torch that is too old; torch is not imported."""
    if sys.version_info < OLDEST_PYTHON:
        here = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(f"AMP Lab needs Python 3.11 or later, not {here}: use a newer runtime")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError("torch is missing: install it from https://pytorch.org") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        raise SetupError(f"AMP Lab needs torch 2.11 or later, not {version}: use a newer runtime")


def fetch():
    """Fetch the commit into a folder beside the notebook, once, and return the folder."""
    if not REPOSITORY:
        raise SetupError(
            "this notebook has no address to fetch from: set GITHUB_REPOSITORY=OWNER/NAME, and "
            "write the edition again"
        )
    target = Path.cwd() / f"amp-lab-{COMMIT[:7]}"
    if target.is_dir():
        return target
    try:
        with tempfile.TemporaryDirectory(prefix=".amp-lab-", dir=Path.cwd()) as scratch:
            folder = Path(scratch) / "checkout"
            git("init", "--quiet", str(folder))
            git("-C", str(folder), "fetch", "--quiet", "--depth=1", REPOSITORY, COMMIT)
            git("-C", str(folder), "checkout", "--quiet", "FETCH_HEAD")
            folder.rename(target)
    except OSError as error:
        raise SetupError(
            f"{Path.cwd()} cannot be written ({error.strerror}): open the notebook in a folder "
            "that you can write to"
        ) from None
    return target


def git(*arguments):
    """Run git; raise `SetupError` with its last line if it fails."""
    settings = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", *arguments], env=settings, capture_output=True, text=True)
    except FileNotFoundError:
        raise SetupError("git is missing: install it, then run this cell again") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1]
        raise SetupError(f"cannot fetch {REPOSITORY} ({reason}): {NO_NETWORK}")


def install(checkout):
    """Install the packages that are missing, and the package `amp-lab` of a checkout, if given.

    Everything that is installed keeps its version. pip installs all of them or none.
    """
    installed = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        installed.setdefault(name, package.version or "")
    wanted = [need for need in PACKAGES if need.partition(">")[0] not in installed]
    if checkout is not None and not is_installed_from(checkout):
        wanted.append(f"amp-lab @ {checkout.as_uri()}")
    if not wanted:
        return
    installed.pop("amp-lab", None)
    pins = []  # such as "numpy==2.3.0"; pip refuses versions of another form
    for name, version in installed.items():
        if VERSION.fullmatch(version):
            pins.append(f"{name}=={version}")
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "installed.txt"
        constraints.write_text("\n".join(pins))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--constraint", str(constraints), *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        reason = errors[0].replace("ERROR: ", "")
        # The first that fits; the last one, "", always does.
        advice = next(text for said, text in ADVICE.items() if re.search(said, done.stderr))
        raise SetupError(f"cannot install {', '.join(wanted)} ({reason}): {advice}")
    importlib.invalidate_caches()


def is_installed_from(checkout):
    """Whether `amp-lab` is installed from this checkout already."""
    try:
        origin = importlib.metadata.distribution("amp-lab").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return checkout.as_uri() in (origin or "")


def describe_machine():
    """One line: the device, torch, and the precisions that are faster than fp32 on the device."""
    import torch

    import course  # noqa: F401 (makes `amp_lab` importable in a checkout)

    from amp_lab.core.device import describe_device, pick_device
    from amp_lab.core.errors import AmpLabError

    try:
        report = describe_device(pick_device())
    except AmpLabError as error:
        raise SetupError(str(error)) from None
    kind = "CPU" if report.device.type == "cpu" else "GPU"
    faster = ", ".join(report.accelerated) or "none"
    print(
        f"{kind}: {report.name}, torch {torch.__version__}; hardware support for matmuls in "
        f"reduced precision: {faster}"
    )


def set_up():
    """Make `course` and `amp_lab` importable, then say what the machine is."""
    check_versions()
    notebooks, checkout = Path.cwd(), None
    if not (notebooks / "course" / "start.py").is_file():
        checkout = fetch()
        notebooks = checkout / "notebooks"
    install(checkout)
    if str(notebooks) not in sys.path:
        sys.path.insert(0, str(notebooks))
    describe_machine()


try:
    set_up()
except SetupError as error:
    if "ipykernel" in sys.modules:  # in Jupyter
        raise
    sys.exit(str(error))
