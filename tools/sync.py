"""Bring the environment in step with pdm.lock: what the other scripts do first.

Does nothing if neither pdm.lock nor pyproject.toml has changed since it last did, so that it needs
no network then. A torch that does not come from the lock, such as AMD's build, is left alone: such
a build carries a label in its version (2.11.0+rocm7.1), which the lock's never does. The group
"bench" is left out then too, since its packages would bring the lock's torch with them.

PDM's cache of downloads stays off: PDM 2.29 with hishel 1.2 adds a copy of every wheel to it at
every install and finds none of them again: 3.4 GB for this lock, and more time.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(sys.prefix) / "amp-lab-synced"  # in the environment, which it describes


def main(arguments: list[str] | None = None) -> int:
    """Run `pdm sync` if need be; return its exit code, or 2 if pdm cannot be found.

    `arguments` go to `pdm sync`.
    """
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    arguments = (sys.argv[1:] if arguments is None else arguments) or without_torch()
    pdm = shutil.which("pdm")
    if pdm is None:
        print("sync: no command `pdm` on the PATH; run this through `pdm run`", file=sys.stderr)
        return 2
    code = subprocess.run([pdm, "--no-cache", "sync", *arguments], cwd=ROOT).returncode
    if code == 0:
        STAMP.write_text(wanted)
    else:  # a full disk shows in PDM's output only as a failure to install some package
        free = shutil.disk_usage(sys.prefix).free / 1e9
        print(f"sync: `pdm sync` failed, with {free:.1f} GB free in {sys.prefix}", file=sys.stderr)
    return code


def fingerprint() -> str:
    """A text that changes with whatever decides what is to be installed, and from where."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in ("pyproject.toml", "pdm.lock"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def without_torch() -> list[str]:
    """The arguments that keep `pdm sync` from replacing a torch of another origin."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if "+" not in version:
        return []
    print(f"sync: keeping torch {version}, which is not the one in pdm.lock", flush=True)
    return ["--without", "torch", "--without", "bench"]


if __name__ == "__main__":
    sys.exit(main())
