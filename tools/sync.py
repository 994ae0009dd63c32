"""Bring the environment in step with pdm.lock: what the other scripts do first.

    pdm run sync                        every group but TensorFlow, which only notebook 12 uses
    pdm run sync --with tensorflow      TensorFlow too
    pdm run sync --torch-index URL      torch from this index, such as one without CUDA

Other arguments go to `pdm sync`, in place of what this script would choose.

Does nothing if neither pdm.lock nor pyproject.toml has changed since it last did, so that it needs
no network then. A torch that does not come from the lock, such as AMD's build, is left alone: such
a build carries a label in its version (2.11.0+rocm7.1), which the lock's never does. The group
"bench" is left out then too, since its packages would bring the lock's torch with them.

With --torch-index, PDM first installs a copy of the lock without torch and the packages for CUDA,
so every other package is checked against its hash. Then pip installs torch and torchvision from
the index: the newest versions there that are not newer than those in the lock.

PDM's cache of downloads stays off: PDM 2.29 with hishel 1.2 adds a copy of every wheel to it at
every install and finds none of them again: 3.4 GB for this lock, and more time.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(sys.prefix) / "amp-lab-synced"  # in the environment, which it describes
OPTIONAL = {"tensorflow": ("tensorflow-cpu", "tensorflow")}  # a group: the packages that show it
FROM_THE_INDEX = ("torch", "torchvision")
FOR_CUDA = ("triton", "nvidia-", "cuda-")  # how the names of the lock's other packages begin


def main(arguments: list[str] | None = None) -> int:
    """Run `pdm sync` if need be; return its exit code, or 2 for what the user has to change."""
    options, for_pdm = read_options(sys.argv[1:] if arguments is None else arguments)
    current = fingerprint()
    missing_groups = [group for group in options.groups if not is_installed(group)]
    if not os.access(sys.prefix, os.W_OK):  # in an image, which stays as it was built
        missing_groups = []
    is_current = STAMP.exists() and STAMP.read_text() == current
    if is_current and not missing_groups and not options.torch_index:
        return 0
    pdm = shutil.which("pdm")
    if pdm is None:
        print("sync: no command `pdm` on the PATH; run this through `pdm run`", file=sys.stderr)
        return 2
    for_pdm = for_pdm or without_optional(options.groups)
    if options.torch_index:
        code = sync_with_index(pdm, options.torch_index, for_pdm)
    else:
        code = run_pdm(pdm, *for_pdm, *without_torch())
    if code == 0:
        STAMP.write_text(current)
    return code


def read_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the other arguments, which are for `pdm sync`."""
    parser = argparse.ArgumentParser(prog="pdm run sync", allow_abbrev=False)
    parser.add_argument(
        "--with",
        dest="groups",
        action="append",
        choices=OPTIONAL,
        default=[],
        help="a group that is left out otherwise",
    )
    parser.add_argument(
        "--torch-index",
        metavar="URL",
        help="install torch from this index, such as https://download.pytorch.org/whl/cpu",
    )
    return parser.parse_known_args(arguments)


def run_pdm(pdm: str, *arguments: str) -> int:
    """Run `pdm sync`; return its exit code. If it fails, print how much disk space is free."""
    code = subprocess.run([pdm, "--no-cache", "sync", *arguments], cwd=ROOT).returncode
    if code != 0:  # a full disk shows in PDM's output only as a failure to install some package
        free = shutil.disk_usage(sys.prefix).free / 1e9
        print(f"sync: `pdm sync` failed, with {free:.1f} GB free in {sys.prefix}", file=sys.stderr)
    return code


def fingerprint() -> str:
    """A text that changes with whatever decides what is to be installed, and from where."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in ("pyproject.toml", "pdm.lock"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(group: str) -> bool:
    """Whether the environment has this optional group."""
    return any(version_of(package) for package in OPTIONAL[group])


def without_optional(groups: list[str]) -> list[str]:
    """The arguments that leave out optional groups, but not `groups` and those that are there."""
    left_out = [group for group in OPTIONAL if group not in groups and not is_installed(group)]
    return [argument for group in left_out for argument in ("--without", group)]


def without_torch() -> list[str]:
    """The arguments that keep `pdm sync` from replacing a torch of another origin."""
    version = version_of("torch")
    if version is None or "+" not in version:
        return []
    print(f"sync: keeping torch {version}, which is not the one in pdm.lock", flush=True)
    return ["--without", "torch", "--without", "bench"]


def sync_with_index(pdm: str, index: str, for_pdm: list[str]) -> int:
    """Install the lock without its torch, then torch from `index`; return an exit code."""
    version = version_of("torch")
    if version is not None and "+" not in version:
        print(
            f"sync: torch {version} is installed with the packages that it needs: "
            f"delete {sys.prefix}, and run this again",
            file=sys.stderr,
        )
        return 2
    pip = pip_command()
    if pip is None:
        print(
            "sync: --torch-index needs pip or ensurepip; on Debian and Ubuntu, install the "
            "package python3-venv",
            file=sys.stderr,
        )
        return 2
    lock = (ROOT / "pdm.lock").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        reduced = Path(folder) / "pdm.lock"
        reduced.write_text(lock_without_torch(lock), encoding="utf-8")
        code = run_pdm(pdm, "--lockfile", str(reduced), *for_pdm)
    if code != 0:
        return code
    install = [*pip, "install", "--index-url", index]
    code = subprocess.run([*install, *torch_requirements(lock)], cwd=ROOT).returncode
    if code != 0:
        print(f"sync: no torch could be installed from {index}", file=sys.stderr)
    return code


def pip_command() -> list[str] | None:
    """How to start pip in this environment; None if there is no pip, and no ensurepip.

    The environment that PDM creates has no pip.
    """
    if importlib.util.find_spec("pip") is None:
        ensurepip = [sys.executable, "-m", "ensurepip"]
        if subprocess.run(ensurepip, stdout=subprocess.DEVNULL).returncode != 0:
            return None
    return [sys.executable, "-m", "pip"]


def lock_without_torch(lock: str) -> str:
    """The text of pdm.lock without torch, torchvision and the packages for CUDA."""
    head, *packages = lock.split("[[package]]\n")
    kept = [package for package in packages if not comes_with_torch(package)]
    return "[[package]]\n".join([head, *kept])


def comes_with_torch(package: str) -> bool:
    """Whether this section of pdm.lock is for torch, torchvision or CUDA."""
    name = tomllib.loads(package)["name"]
    return name in FROM_THE_INDEX or name.startswith(FOR_CUDA)


def torch_requirements(lock: str) -> list[str]:
    """What pip has to install: the group "torch", in no newer version than in pdm.lock."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    packages = tomllib.loads(lock)["package"]
    locked = {package["name"]: package["version"] for package in packages}
    requirements = []
    for entry in groups["torch"]:  # such as ``torch>=2.11``
        name, _, _ = entry.partition(">")
        requirements.append(f"{entry},<={locked[name]}")
    return requirements


if __name__ == "__main__":
    sys.exit(main())
