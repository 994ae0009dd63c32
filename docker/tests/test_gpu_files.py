"""The compose files for GPUs, checked without one; and the ROCm image, on a stand-in base."""

import json
import re
import subprocess

import pytest

from conftest import Service

FILES = ["compose.yaml", "compose.cuda.yaml", "compose.rocm.yaml"]

# Stands in for AMD's image: a Python that already holds a torch, where AMD keeps its own.
STAND_IN = """
FROM python:3.11-slim-bookworm
RUN python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \\
    && mkdir "$site/torch" "$site/torch-2.11.0+rocm7.1.dist-info" \\
    && echo '__version__ = "2.11.0+rocm7.1"' > "$site/torch/__init__.py" \\
    && printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 2.11.0+rocm7.1\\n' \\
       > "$site/torch-2.11.0+rocm7.1.dist-info/METADATA"
"""


def config(checkout, file: str, **settings: str) -> dict:
    """The `lab` service of a compose file, as Compose understands it."""
    done = Service(checkout, f"docker/{file}", **settings).compose("config", "--format", "json")
    return json.loads(done.stdout)["services"]["lab"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", [".", "docker"])
def test_every_file_works_alone_from_the_root_and_from_its_folder(checkout, file, place):
    service = Service(checkout / place, f"docker/{file}" if place == "." else file)
    done = service.compose("config", "--format", "json")
    lab = json.loads(done.stdout)["services"]["lab"]
    assert lab["build"]["context"] == str(checkout)


def test_the_file_in_the_root_is_the_one_for_cpus(checkout):
    def services(*files: str) -> dict:
        done = Service(checkout, *files).compose("config", "--format", "json")
        return json.loads(done.stdout)["services"]

    assert services() == services("docker/compose.yaml")


@pytest.mark.parametrize("files", [[], *([f"docker/{name}"] for name in FILES)], ids=str)
def test_settings_in_a_file_arrive(checkout, files):
    """Through the file in the root too, which includes another: of a mapping they would not."""
    written = {"JUPYTER_TOKEN": "of-a-file", "AMP_LAB_DEVICE": "cpu", "AMP_LAB_SCALE": "quick"}
    place = checkout / "docker" / ".env"
    place.write_text("".join(f"{name}={value}\n" for name, value in written.items()))
    try:
        done = Service(checkout, *files).compose("config", "--format", "json")
    finally:
        place.unlink()
    assert json.loads(done.stdout)["services"]["lab"]["environment"].items() >= written.items()


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_as_safe_as_the_first(checkout, file):
    lab = config(checkout, file)
    assert [(p["host_ip"], p["target"]) for p in lab["ports"]] == [("127.0.0.1", 8888)]
    assert lab["cap_drop"] == ["ALL"]
    assert lab["security_opt"] == ["no-new-privileges:true"]
    assert lab["read_only"] is True
    assert not lab["user"].startswith("0")
    assert lab["restart"] == "on-failure:5"
    assert int(lab["shm_size"]) == 2 * 2**30
    assert int(lab["mem_limit"]) == 16 * 2**30
    assert {v["target"] for v in lab["volumes"]} == {"/work/src", "/work/notebooks", "/work/data"}
    for forbidden in ("privileged", "network_mode", "cap_add", "pid", "ipc"):
        assert forbidden not in lab


@pytest.mark.parametrize("file", FILES)
def test_the_memory_limit_can_be_set(checkout, file):
    assert int(config(checkout, file, AMP_LAB_MEMORY="48g")["mem_limit"]) == 48 * 2**30


def test_cuda_reserves_the_gpus(checkout):
    lab = config(checkout, "compose.cuda.yaml")
    devices = lab["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"capabilities": ["gpu"], "driver": "nvidia", "count": -1}]
    assert lab["build"]["dockerfile"] == "docker/Dockerfile"


def test_rocm_has_amds_devices_and_the_groups_that_own_them(checkout):
    lab = config(checkout, "compose.rocm.yaml", AMP_LAB_RENDER_GID="992")
    sources = {d if isinstance(d, str) else d["source"] for d in lab["devices"]}
    assert {re.sub(":.*", "", source) for source in sources} == {"/dev/kfd", "/dev/dri"}
    assert lab["group_add"] == ["44", "992"]
    assert lab["build"]["dockerfile"] == "docker/Dockerfile.rocm"


def test_the_rocm_image_keeps_the_torch_of_its_base(checkout):
    subprocess.run(
        ["docker", "build", "--tag", "amp-lab-rocm-stand-in", "-"],
        input=STAND_IN,
        text=True,
        check=True,
        capture_output=True,
    )
    service = Service(checkout, "docker/compose.rocm.yaml")
    service.compose("build", "--build-arg", "BASE=amp-lab-rocm-stand-in")
    look = (
        "import torch, importlib.metadata as m; print(torch.__version__, torch.__file__); "
        "print([d.name for d in m.distributions() if d.name.startswith(('nvidia', 'triton'))])"
    )
    torch, packages = run_in_rocm_image("python", "-c", look).splitlines()
    assert torch == "2.11.0+rocm7.1 /opt/venv/lib/python3.11/site-packages/torch/__init__.py"
    assert packages == "[]"
    run_in_rocm_image("python", "-c", "import amp_lab, jupyterlab, numpy, sklearn, nbval")
    assert run_in_rocm_image("pdm", "run", "sync") == ""  # nothing to do, nothing to download


def run_in_rocm_image(*command: str) -> str:
    """What a command prints in the ROCm image, off the network."""
    return subprocess.run(
        ["docker", "run", "--rm", "--network=none", "amp-lab-rocm", *command],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
