"""The CPU image, built and run as a reader would: healthy, closed, and owned by nobody else."""

import base64
import http.client
import json
import os
import re
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from conftest import OWNER, TOKEN, Service, free_port

ROUTES = (Path(__file__).parent / "routes.py").read_text()
REAL_FILES = (
    "/lab",
    "/lab/tree/notebooks/01_number_formats.ipynb",
    "/tree",
    "/api/contents",
    "/api/contents/notebooks/01_number_formats.py",
    "/files/notebooks/01_number_formats.py",
    "/files/pyproject.toml",
    "/view/notebooks/01_number_formats.ipynb",
    "/nbconvert/html/notebooks/01_number_formats.ipynb",
    "/kernelspecs/python3/kernel.json",
)
# Open to all by Jupyter's design, without anything of the user's in them: the version, the sign-in
# page, and the pictures and scripts that come with the package.
PUBLIC = {
    "APIVersionHandler",
    "LoginFormHandler",
    "LogoutHandler",
    "PublicStaticFileHandler",
    "FileFindHandler",
}
# jupyterlab_server's handler for licences fails to send its refusal: no answer comes at all.
MUTE = {"LicensesHandler"}
# The server is the one child of PID 1.
KILL_SERVER = """
import glob, os, re
for path in glob.glob("/proc/[0-9]*/stat"):
    pid, parent = re.match(r"(\\d+) \\(.*\\) \\S (\\d+)", open(path).read()).groups()
    if parent == "1":
        os.kill(int(pid), 9)
"""
WHAT_AN_IMAGE_CAN_BREAK = (  # kernels, worker processes, files, the tools, the command
    "notebooks/03_grad_scaler_step_by_step.ipynb",
    "tests/train/data",
    "tests/train/checkpoint",
    "tests/tools",
    "tests/cli/test_cli.py",
)
SECRETS = ("amp_lab", "jupytext", "python3", "GradScaler")  # words that only content would have


def request(lab: Service, method: str, path: str, headers: dict | None = None, timeout: float = 20):
    """Status, headers and body of one HTTP request; redirects are not followed."""
    port = int(lab.settings["AMP_LAB_PORT"])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode(errors="replace")
    finally:
        connection.close()


def websocket_headers() -> dict[str, str]:
    return {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
    }


@pytest.fixture(scope="module")
def routes(lab) -> dict[str, str]:
    """An example of every route that the server has, by the server's own account."""
    done = lab.compose("exec", "-T", "lab", "python", "-c", ROUTES)
    found = json.loads(done.stdout.splitlines()[-1])
    return {path: handler for path, handler in found.items() if path.startswith("/")}


def test_the_log_is_free_of_errors(lab):
    wrong = [line for line in lab.log().splitlines() if re.search(r"\[[EC] |Traceback|Error", line)]
    harmless = (
        "To access the server|^.*\\[C .*ServerApp\\]\\s*$"  # the banner is logged as critical
    )
    assert [line for line in wrong if not re.search(harmless, line)] == []


def test_the_log_has_one_address_with_the_port_outside(lab):
    """Without the token, which the user has set here and need not be told."""
    addresses = set(re.findall(r"\w+://\S+", lab.log()))
    port = lab.settings["AMP_LAB_PORT"]
    assert addresses == {f"http://127.0.0.1:{port}/lab/tree/notebooks/00_start_here.ipynb"}


def test_there_are_as_many_routes_as_a_jupyterlab_has(routes):
    assert len(routes) > 50
    for kind in ("KernelWebsocketHandler", "TermSocket", "ContentsHandler", "LabHandler"):
        assert kind in routes.values()


@pytest.mark.parametrize("token", [None, "wrong", ""], ids=["none", "wrong", "empty"])
def test_no_route_gives_anything_without_the_token(lab, routes, token):
    headers = {} if token is None else {"Authorization": f"token {token}"}
    query = "" if token is None else f"?token={token}"
    paths = routes | dict.fromkeys(REAL_FILES, "")
    for path, handler in paths.items():
        if handler in MUTE:
            with pytest.raises(TimeoutError):
                request(lab, "GET", path + query, headers, timeout=3)
            continue
        status, _, body = request(lab, "GET", path + query, headers)
        if handler in PUBLIC:
            assert not any(secret in body for secret in SECRETS), path
            continue
        assert status in (302, 401, 403, 404, 405), (path, status, body[:200])
        assert not any(secret in body for secret in SECRETS), path


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_no_route_takes_anything_without_the_token(lab, routes, method):
    for path, handler in routes.items():
        if handler == "LoginFormHandler" or handler in MUTE:
            continue
        status, _, body = request(lab, method, path)
        assert status in (302, 401, 403, 404, 405), (path, status, body[:200])


def test_no_websocket_opens_without_the_token(lab, routes):
    sockets = [path for path, handler in routes.items() if "socket" in handler.lower()]
    assert len(sockets) >= 3
    for path in sockets:
        status, _, _ = request(lab, "GET", path, websocket_headers())
        assert status in (302, 401, 403, 404), (path, status)  # 101 would be an open one


def test_with_the_token_they_work(lab):
    headers = {"Authorization": f"token {TOKEN}"}
    for path in ("/api/contents", "/api/kernels", "/api/terminals", "/lab", "/files/README.md"):
        status, _, body = request(lab, "GET", path, headers)
        assert status == 200, (path, status, body[:200])
    names = [
        entry["name"]
        for entry in json.loads(request(lab, "GET", "/api/contents/notebooks", headers)[2])[
            "content"
        ]
    ]
    assert "01_number_formats.ipynb" in names


def test_inside_it_is_nobody_in_particular(lab):
    assert lab.run_inside("id", "-u").strip() == str(OWNER)
    status = lab.run_inside("cat", "/proc/1/status")
    for line in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert re.search(rf"^{line}:\t0+$", status, re.MULTILINE), line
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert re.search(rf"^Uid:\t{OWNER}\t{OWNER}\t{OWNER}\t{OWNER}$", status, re.MULTILINE)
    assert lab.run_inside("cat", "/proc/1/comm").strip() == "tini"


def test_only_code_notebooks_and_data_of_the_host_are_there(lab):
    binds = [mount for mount in lab.inspect()["Mounts"] if mount["Type"] == "bind"]
    expected = {"/work/src", "/work/notebooks", "/work/data"}
    assert {mount["Destination"] for mount in binds} == expected
    for path in ("/work/src/x", "/work/x", "/etc/x", "/x"):
        assert lab.compose("exec", "-T", "lab", "touch", path, check=False).returncode != 0


def test_the_port_is_bound_to_this_machine_alone(lab):
    ports = lab.inspect()["NetworkSettings"]["Ports"]
    assert ports == {
        "8888/tcp": [{"HostIp": "127.0.0.1", "HostPort": lab.settings["AMP_LAB_PORT"]}]
    }


def test_torch_compile_works(lab):
    program = (
        "import torch; f = torch.compile(lambda x: x.sin() + 1); print(f(torch.zeros(3)).sum())"
    )
    assert lab.run_inside("python", "-c", program).strip() == "tensor(3.)"


def test_a_driver_that_is_too_old_is_said(lab):
    """A driver of CUDA 12.8, as far as torch asks it; the image has torch for CUDA 13."""
    driver = """
    int cuInit(unsigned flags) { return 0; }
    int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
    """
    build = f"printf '%s' '{driver}' | gcc -x c -shared -fPIC -o /tmp/libcuda.so.1 -"
    said = lab.run_inside("sh", "-c", f"{build} && LD_LIBRARY_PATH=/tmp amp-lab doctor 2>&1")
    assert "The NVIDIA driver on your system is too old (found version 12080)" in said


def test_an_old_gpu_is_said(lab):
    program = (
        "import torch; torch.cuda.get_device_name = lambda index: 'GTX 1080'; "
        "torch.cuda._warn_unsupported_code(0, 61, [75])"
    )
    said = lab.run_inside("sh", "-c", f'python -c "{program}" 2>&1')
    assert "does not include kernels for this GPU" in said


def test_tensorflow_is_left_out(lab):
    look = "from importlib.util import find_spec as find; print(find('keras'), find('tensorflow'))"
    assert re.match(r"ModuleSpec.* None$", lab.run_inside("python", "-c", look))


def test_a_file_saved_inside_belongs_to_the_owner_outside(lab):
    lab.run_inside("touch", "/work/data/made-inside")
    made = (lab.checkout / "data" / "made-inside").stat()
    assert (made.st_uid, made.st_gid) == (OWNER, OWNER)


def test_kill_9_restarts_it_and_loses_nothing(lab):
    lab.run_inside("sh", "-c", "echo kept > /work/notebooks/kept.txt")
    started = lab.inspect()["State"]["StartedAt"]
    lab.run_inside("python", "-c", KILL_SERVER, check=False)  # may end with its container
    lab.wait(lambda: lab.inspect()["State"]["StartedAt"] != started, "restarted")
    lab.wait(lab.is_healthy, "healthy again")
    assert lab.inspect()["RestartCount"] == 1
    assert (lab.checkout / "notebooks" / "kept.txt").read_text() == "kept\n"


def test_a_kernel_that_ends_leaves_no_zombie(lab):
    headers = {"Authorization": f"token {TOKEN}"}
    for _ in range(2):
        status, _, body = request(lab, "POST", "/api/kernels", headers)
        assert status == 201, body
        kernel = json.loads(body)["id"]
        time.sleep(3)
        assert request(lab, "DELETE", f"/api/kernels/{kernel}", headers)[0] == 204
    states = lab.run_inside("sh", "-c", "cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1")
    assert "Z" not in states.split()


def test_it_stops_when_told(lab):
    started = time.monotonic()
    lab.compose("stop")
    assert time.monotonic() - started < 10  # after that the engine would kill it
    assert lab.inspect()["State"]["ExitCode"] != 137
    lab.compose("start")
    lab.wait(lab.is_healthy, "healthy again")


def started_wrongly(image: Path, override: str, **settings: str) -> str:
    """What the service says when it is started with something wrong, and has given up."""
    file = image.parent / f"override-{free_port()}.yaml"
    file.write_text(override or "services: {lab: {}}\n")
    service = Service(image, "docker/compose.yaml", file, **settings)
    service.settings["COMPOSE_PROJECT_NAME"] = "amp-lab-wrong"
    try:
        done = service.compose("run", "--rm", "-T", "lab", check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("lab: ")]
        assert len(said) == 1
        assert "Traceback" not in done.stdout + done.stderr
        return said[0]
    finally:
        service.compose("down", check=False)


def test_an_empty_token_refuses_to_start(image):
    said = started_wrongly(image, "", JUPYTER_TOKEN="")
    assert "JUPYTER_TOKEN is empty" in said


def test_a_full_tmp_is_said(image):
    said = started_wrongly(image, "services: {lab: {tmpfs: ['/tmp:size=64k']}}\n")
    assert "no temporary file can be written" in said


def test_a_read_only_mount_is_said(image):
    volumes = f"['{image}/notebooks:/work/notebooks:ro']"
    said = started_wrongly(image, f"services: {{lab: {{volumes: {volumes}}}}}\n")
    assert "nothing can be saved in /work/notebooks (Read-only file system)" in said


def test_another_owner_is_said_with_the_remedy(image):
    said = started_wrongly(image, "", AMP_LAB_UID="1000", AMP_LAB_GID="1000")
    assert f"AMP_LAB_UID={OWNER} and AMP_LAB_GID={OWNER}" in said


def test_a_taken_port_is_said(image):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        service = Service(image, "docker/compose.yaml", AMP_LAB_PORT=str(port))
        service.settings["COMPOSE_PROJECT_NAME"] = "amp-lab-taken"
        try:
            done = service.compose("up", "--detach", check=False)
        finally:
            service.compose("down", check=False)
    assert done.returncode != 0
    assert re.search(f"{port}.*(address already in use|already allocated)", done.stderr)


def test_a_changed_notebook_rebuilds_nothing_but_its_copy(image):
    file = image.parent / "override-changed.yaml"
    file.write_text("services: {lab: {image: amp-lab-changed}}\n")
    service = Service(image, "docker/compose.yaml", file)
    notebook = image / "notebooks" / "01_number_formats.py"
    text = notebook.read_text()
    try:
        # New at every run: an engine remembers what earlier runs have copied.
        notebook.write_text(f"{text}\n# {uuid.uuid4()}\n")
        done = service.compose("--progress", "plain", "build")
    finally:
        notebook.write_text(text)
    subprocess.run(["docker", "image", "rm", "amp-lab-changed"], check=True, capture_output=True)
    steps = re.findall(r"^#(\d+) \[lab .*?\] (.*)$", done.stdout + done.stderr, re.MULTILINE)
    cached = set(re.findall(r"^#(\d+) CACHED", done.stdout + done.stderr, re.MULTILINE))
    ran = [step for number, step in dict(steps).items() if number not in cached]
    assert [step for step in ran if step.startswith(("RUN", "COPY"))] == ["COPY . ."]


def test_the_test_line_passes_inside(image):
    """What an image can break; all of it with AMP_LAB_INSIDE=all, as in the weekly run."""
    part = () if os.environ.get("AMP_LAB_INSIDE") == "all" else WHAT_AN_IMAGE_CAN_BREAK
    service = Service(image, "docker/compose.yaml")
    service.settings["COMPOSE_PROJECT_NAME"] = "amp-lab-inside"
    done = service.compose("run", "--rm", "-T", "lab", "pdm", "run", "test", *part)
    assert re.search(r"=+ \d+ passed(, \d+ skipped)? in ", done.stdout), done.stdout[-2000:]
