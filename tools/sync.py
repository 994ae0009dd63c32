"""Bring the environment in step with pdm.lock: what the other scripts do first.

A torch that does not come from the lock, such as AMD's build, is left alone: such a build carries a
label in its version (2.11.0+rocm7.1), which the lock's never does.
"""

import importlib.metadata
import shutil
import subprocess
import sys


def main() -> int:
    """Run `pdm sync`; return its exit code, or 2 if pdm cannot be found."""
    pdm = shutil.which("pdm")
    if pdm is None:
        print(
            "sync: there is no command `pdm` on the PATH; run this through `pdm run`",
            file=sys.stderr,
        )
        return 2
    return subprocess.run([pdm, "sync", *without_torch()]).returncode


def without_torch() -> list[str]:
    """The arguments that keep `pdm sync` from replacing a torch of another origin."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if "+" not in version:
        return []
    print(f"sync: keeping torch {version}, which is not the one in pdm.lock", flush=True)
    return ["--without", "torch"]


if __name__ == "__main__":
    sys.exit(main())
