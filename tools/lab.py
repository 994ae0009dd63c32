"""Open JupyterLab on the notebooks: `pdm run lab [--port N] [any option of jupyter lab]`.

JupyterLab alone would take another port when the one asked for is taken, and refuse to run as root.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "tools" / "jupyterlab_settings"


def main(argv: list[str] | None = None) -> int:
    """Open JupyterLab; return its exit code, or 2 for something the user can put right."""
    parser = argparse.ArgumentParser(
        prog="lab", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--port", default=os.environ.get("JUPYTER_PORT", "8888"), help="default: 8888"
    )
    parser.add_argument(
        "--ip", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    options, rest = parser.parse_known_args(argv)
    problem = port_problem(options.ip, options.port) or setting_problem()
    if problem:
        print(f"lab: {problem}", file=sys.stderr)
        return 2

    from jupyterlab.labapp import main as jupyter_lab

    arguments = [
        f"--ip={options.ip}",
        f"--port={options.port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={ROOT}",
        f"--ServerApp.preferred_dir={ROOT / 'notebooks'}",
        f"--LabApp.app_settings_dir={SETTINGS}",  # no questions about news, and no look-ups
        *rest,
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")
    return jupyter_lab(arguments) or 0


def port_problem(ip: str, port: str) -> str | None:
    """What keeps a server from listening there, in a line; None if nothing does."""
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return f"--port {port}: a port is a whole number from 1 to 65535"
    try:
        with socket.create_server((ip, int(port))):
            return None
    except OSError as error:
        hint = "stop what uses it, perhaps another JupyterLab, or take another with --port"
        return f"port {port} on {ip} cannot be used ({error.strerror}): {hint}"


def setting_problem() -> str | None:
    """What is wrong with AMP_LAB_DEVICE or AMP_LAB_SCALE, said now and not in the first cell."""
    if not os.environ.get("AMP_LAB_DEVICE") and not os.environ.get("AMP_LAB_SCALE"):
        return None  # the usual case, which need not load torch
    from amp_lab.device import pick_device
    from amp_lab.errors import AmpLabError
    from amp_lab.notebook import pick_scale

    try:
        pick_scale(pick_device())
    except AmpLabError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
