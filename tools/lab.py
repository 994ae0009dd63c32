"""Open JupyterLab on the notebooks: `pdm run lab [--port N] [any option of jupyter lab]`.

JupyterLab alone would take another port when the one asked for is taken, refuse to run as root, and
accept an empty token.
"""

import argparse
import importlib.util
import os
import re
import socket
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
SETTINGS = ROOT / "tools" / "jupyterlab_settings"
START = "notebooks/00_start_here.ipynb"  # what JupyterLab opens on
# Not in the list of files: a notebook stands there once, as its .ipynb, which saves the .py too.
HIDDEN = ("__pycache__", ".*", "*~", "[0-9][0-9]_*.py", "[0-9][0-9][a-z]_*.py", "*.png")


def main(argv: list[str] | None = None) -> int:
    """Open JupyterLab; return its exit code, or 2 for something the user can put right."""
    parser = argparse.ArgumentParser(
        prog="lab", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    port = os.environ.get("JUPYTER_PORT", "8888")
    parser.add_argument("--port", nargs="?", const="", default=port)
    parser.add_argument("--ip", nargs="?", const="", default="127.0.0.1")
    options, rest = parser.parse_known_args(argv)
    problem = (
        token_problem(rest)
        or port_problem(options.ip, options.port)
        or folder_problem(NOTEBOOKS)
        or temporary_problem()
        or setting_problem()
    )
    if problem:
        print(f"lab: {problem}", file=sys.stderr)
        return 2

    from jupyter_server.utils import JupyterServerAuthWarning
    from jupyterlab.labapp import LabApp

    import lab_contents

    # It names routes that do not ask for the token by themselves. With allow_unauthenticated_access
    # off, the server asks in their place.
    warnings.simplefilter("ignore", JupyterServerAuthWarning)
    arguments = [
        f"--ip={options.ip}",
        f"--port={options.port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.allow_unauthenticated_access=False",
        f"--ServerApp.root_dir={ROOT}",
        f"--ContentsManager.preferred_dir={NOTEBOOKS}",
        "--ServerApp.contents_manager_class=lab_contents.Contents",
        *(f"--ContentsManager.hide_globs={pattern}" for pattern in HIDDEN),
        f"--LabApp.default_url=/lab/tree/{START}",
        f"--LabApp.app_settings_dir={SETTINGS}",  # no questions about news, and no look-ups
        # It would start `pyrefly lsp`, which takes the CPU while notebook 00 measures it.
        "--LanguageServerManager.autodetect=False",
        *rest,
        # Last, so that it counts: it ends a server that would ask for no token.
        "--ServerApp.identity_provider_class=lab_contents.TokenRequired",
    ]
    if os.environ.get("AMP_LAB_PORT"):  # a container's port has another number outside
        address = f"http://127.0.0.1:{os.environ['AMP_LAB_PORT']}"
        arguments.append(f"--ServerApp.custom_display_url={address}")
        LabApp.serverapp_class = lab_contents.ServerApp
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")
    return LabApp.launch_instance(arguments) or 0


def token_problem(arguments: list[str]) -> str | None:
    """A line if the token is given and empty, which would let anyone in; None otherwise."""
    empty = [a for a in arguments if re.fullmatch(r"--\w+\.token=['\"]*", a)]
    if os.environ.get("JUPYTER_TOKEN") == "":
        empty.append("JUPYTER_TOKEN")
    if not empty:
        return None
    return f"{empty[0]} is empty, and would let anyone in: give a token, or leave it out to get one"


def port_problem(ip: str, port: str) -> str | None:
    """What keeps a server from listening there, in a line; None if nothing does."""
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return f"--port {port}: a port is a whole number from 1 to 65535"
    if not ip:
        return "--ip needs an address, 127.0.0.1 for one"
    host = "0.0.0.0" if ip == "*" else ip  # all addresses
    try:
        family, *_, address = socket.getaddrinfo(host, int(port))[0]
    except OSError:
        return f"--ip {ip}: this is no address of this machine"
    try:
        # Two parts of it, host and port; an IPv6 address has four.
        with socket.create_server(address[:2], family=family):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        hint = "stop what uses it, perhaps another JupyterLab, or take another with --port"
        return f"port {port} on {ip} cannot be used ({reason}): {hint}"


def folder_problem(folder: Path) -> str | None:
    """A line if notebooks could not be saved there; None otherwise."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        if not folder.exists() or not hasattr(os, "geteuid"):
            return f"nothing can be saved in {folder} ({error.strerror})"
        owner = folder.stat()
        server_user = f"{os.geteuid()}:{os.getegid()}"
        if owner.st_uid == 0:
            return (
                f"nothing can be saved in {folder} ({error.strerror}): it belongs to root. Give it "
                f"to the user that this server runs as: chown -R {server_user} notebooks data"
            )
        return (
            f"nothing can be saved in {folder} ({error.strerror}): it belongs to "
            f"{owner.st_uid}:{owner.st_gid}, this server runs as {server_user}. In a container, "
            f"set AMP_LAB_UID={owner.st_uid} and AMP_LAB_GID={owner.st_gid}, and mount it writable"
        )


def temporary_problem() -> str | None:
    """A line if there is no room for temporary files; None otherwise."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(2**20))
            file.flush()
            return None
    except OSError as error:
        return f"no temporary file can be written ({error.strerror}): make room in /tmp"


def setting_problem() -> str | None:
    """What is wrong with AMP_LAB_DEVICE or AMP_LAB_SCALE, said now and not in the first cell."""
    if not os.environ.get("AMP_LAB_DEVICE") and not os.environ.get("AMP_LAB_SCALE"):
        return None  # the usual case, which need not load torch
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; run `pdm run sync`, or on AMD see docs/hardware.md"
    sys.path.append(str(NOTEBOOKS))
    from course import pick_scale

    from amp_lab.core.device import pick_device
    from amp_lab.core.errors import AmpLabError

    try:
        pick_scale(pick_device())
    except AmpLabError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
