"""The compose files for GPUs, checked without one; and images with another torch, a stand-in."""

import json
import re
import subprocess
import zipfile
from pathlib import Path

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

LOOK = """
import torch, importlib.metadata as m
print(torch.__version__, torch.__file__)
print([d.name for d in m.distributions() if d.name.startswith(("nvidia", "triton"))])
"""
# The packages of torch that are imported when the image is built.
OF_TORCH = ("", "_dynamo/", "_inductor/", "_inductor/codegen/", "_inductor/codegen/cpp/")
OF_TORCH += ("_inductor/compile_fx/",)


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
def test_what_the_image_holds_can_be_set(checkout, file):
    index = "https://example.org/whl"
    lab = config(checkout, file, AMP_LAB_TENSORFLOW="1", AMP_LAB_TORCH_INDEX=index)
    assert lab["build"]["args"] == {"TENSORFLOW": "1", "TORCH_INDEX": index}
    assert set(config(checkout, file)["build"]["args"].values()) == {""}


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
    torch, packages = run_in("amp-lab-rocm", "python", "-c", LOOK).splitlines()
    assert torch == "2.11.0+rocm7.1 /opt/venv/lib/python3.11/site-packages/torch/__init__.py"
    assert packages == "[]"
    run_in("amp-lab-rocm", "python", "-c", "import amp_lab, jupyterlab, numpy, sklearn, nbval")
    assert run_in("amp-lab-rocm", "pdm", "run", "sync") == ""  # nothing to do, nothing to download


def write_wheel(index: Path, name: str, version: str, modules: tuple[str, ...]) -> None:
    """Add a wheel that holds no more than its version to a package index in a folder."""
    about = f"{name}-{version}.dist-info"
    files = {f"{name}/{module}__init__.py": f"__version__ = '{version}'\n" for module in modules}
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    (index / name).mkdir(parents=True, exist_ok=True)
    wheel = f"{name}-{version}-py3-none-any.whl"
    with open(index / name / "index.html", "a") as page:
        page.write(f'<a href="{wheel}">{wheel}</a>\n')
    with zipfile.ZipFile(index / name / wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


def test_torch_comes_from_the_index_that_is_named(checkout, tmp_path):
    write_wheel(tmp_path / "index", "torch", "2.12.0+cpu", OF_TORCH)
    write_wheel(tmp_path / "index", "torch", "99.0.0+cpu", OF_TORCH)  # newer than the lock's
    write_wheel(tmp_path / "index", "torchvision", "0.27.0+cpu", ("",))
    base = "FROM python:3.11-slim-bookworm\nCOPY index /index\n"
    (tmp_path / "Dockerfile").write_text(base)
    command = ["docker", "build", "--tag", "amp-lab-index-stand-in", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    override = tmp_path / "override.yaml"
    override.write_text("services: {lab: {image: amp-lab-index}}\n")
    service = Service(
        checkout, "docker/compose.yaml", override, AMP_LAB_TORCH_INDEX="file:///index"
    )
    service.compose("build", "--build-arg", "BASE=amp-lab-index-stand-in")
    torch, packages = run_in("amp-lab-index", "python", "-c", LOOK).splitlines()
    assert torch == "2.12.0+cpu /work/.venv/lib/python3.11/site-packages/torch/__init__.py"
    assert packages == "[]"
    assert run_in("amp-lab-index", "pdm", "run", "sync") == ""  # and it stays


def run_in(image: str, *command: str) -> str:
    """What a command prints in an image, off the network."""
    return subprocess.run(
        ["docker", "run", "--rm", "--network=none", image, *command],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
