"""What the container tests share: a checkout owned by another user, and the running service."""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-the-tests"
OWNER = 12345  # neither root nor the image's default user
HEALTHY_WITHIN_S = 30
PROJECT = "amp-lab-tests-" + os.environ.get("PYTEST_XDIST_WORKER", "alone")


class Service:
    """The `lab` service of a compose file in a checkout, driven through `docker compose`."""

    def __init__(self, checkout: Path, *files: str, **settings: str):
        self.checkout = checkout
        self.files = [argument for file in files for argument in ("-f", str(file))]
        owner = {"AMP_LAB_UID": str(OWNER), "AMP_LAB_GID": str(OWNER)}
        self.settings = {"COMPOSE_PROJECT_NAME": PROJECT} | owner | settings

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Run `docker compose …`; with `check`, fail the test with its output if it fails."""
        done = subprocess.run(
            ["docker", "compose", *self.files, *arguments],
            cwd=self.checkout,
            env={k: v for k, v in os.environ.items() if k != "JUPYTER_TOKEN"} | self.settings,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def run_inside(self, *command: str, check: bool = True) -> str:
        """Run a command in the running container; return what it printed."""
        return self.compose("exec", "-T", "lab", *command, check=check).stdout

    def inspect(self) -> dict:
        """What the engine knows about the container."""
        name = self.compose("ps", "--all", "--quiet", "lab").stdout.strip()
        done = subprocess.run(
            ["docker", "inspect", name], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)[0]

    def log(self) -> str:
        return self.compose("logs", "--no-color").stdout

    def wait(self, condition, what: str, seconds: float = HEALTHY_WITHIN_S) -> None:
        """Wait until `condition()` holds, and fail with the log if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not {what} within {seconds} s:\n{self.log()}"
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        state = self.inspect()["State"]
        return state["Running"] and state["Health"]["Status"] == "healthy"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of what git tracks, owned by `OWNER`, as on the machine of a user of that number."""
    if os.geteuid() != 0:
        pytest.skip("the container tests give files to another user, and so need root")
    folder = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, OWNER, OWNER)
        path.chmod(0o755 if path.is_dir() else 0o644)
    for parent in folder.parents[:2]:  # pytest's own folders are for root alone
        parent.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def image(checkout) -> Path:
    """The checkout, once the CPU image is built from it."""
    Service(checkout, "docker/compose.yaml").compose("build")
    return checkout


@pytest.fixture(scope="module")
def lab(image) -> Service:
    """The CPU service, started with a token, and healthy."""
    # Without a file, as in `docker compose up`: Compose takes compose.yaml in the root.
    service = Service(image, JUPYTER_TOKEN=TOKEN, AMP_LAB_PORT=str(free_port()))
    service.compose("up", "--detach", "--no-build")
    try:
        service.wait(service.is_healthy, "healthy")
        yield service
    finally:
        service.compose("down", "--timeout", "5", check=False)
