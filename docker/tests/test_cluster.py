"""Training on several machines: two containers do it; the SLURM and Kubernetes files are read."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import config_from_args, parse_args

from amp_lab import load_checkpoint
from amp_lab.cli import _parser
from conftest import PROJECT, ROOT, Service

COMPOSE = "docker/compose.cluster.yaml"
SLURM = ROOT / "docker" / "slurm.sbatch"
KUBERNETES = ROOT / "docker" / "kubernetes.yaml"
NODES = ("node0", "node1")
EPOCHS = 8
# Small, but with dropout and batch norm: what each process has for itself must come back, too.
TRAINED = "--dataset digits --model mobilenet_v3_small --limit 128 --image-size 16"
# What Trainer 2.0 to 2.3 all know: fields of its own API, by the path to the object they are in.
TRAINER_FIELDS = {
    "TrainJob.spec": {"runtimeRef", "initializer", "trainer", "suspend", "managedBy"},
    "TrainJob.spec.runtimeRef": {"apiGroup", "kind", "name"},
    "TrainJob.spec.trainer": {
        *("image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"),
    },
    "TrainingRuntime.spec": {"mlPolicy", "podGroupPolicy", "template"},
    "TrainingRuntime.spec.mlPolicy": {"numNodes", "torch", "mpi"},
    "TrainingRuntime.spec.mlPolicy.torch": set(),
    "TrainingRuntime.spec.template": {"metadata", "spec"},
    "TrainingRuntime.spec.template.spec": {
        *("replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy"),
        *("suspend", "coordinator", "managedBy", "ttlSecondsAfterFinished"),
    },
    "TrainingRuntime.spec.template.spec.failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
}
STAND_INS = {  # for SLURM's commands
    "scontrol": 'test "$1" != show || seq -f "m%g" 4 7',
    "scancel": 'kill "$(cat "$NOTES/step")"',
    "srun": 'echo $$ > "$NOTES/step"; exec sleep "${STEP_TAKES:-0}"',
}


class Cluster(Service):
    """The two nodes, and the folder of the run that they train together."""

    def __init__(self, checkout: Path, run: str):
        super().__init__(checkout, COMPOSE, AMP_LAB_TRAIN=TRAINED, AMP_LAB_EPOCHS=str(EPOCHS))
        self.project = f"{PROJECT}-{run}"
        self.settings |= {"AMP_LAB_RUN": run, "COMPOSE_PROJECT_NAME": self.project}
        self.folder = checkout / "data" / "runs" / run

    def up(self) -> None:
        self.compose("up", "--detach", "--no-build")

    def nodes(self) -> list[dict]:
        """What the engine knows about their containers."""
        return inspected("container", *(f"{self.project}-{name}-1" for name in NODES))

    def have_ended(self) -> bool:
        return all(node["State"]["Status"] == "exited" for node in self.nodes())

    def exit_codes(self) -> list[int]:
        return [node["State"]["ExitCode"] for node in self.nodes()]

    def epochs_done(self) -> int:
        metrics = self.folder / "metrics.csv"
        return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0

    def sentence(self, name: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", name).stdout


def inspected(kind: str, *names: str) -> list[dict]:
    done = subprocess.run(
        ["docker", kind, "inspect", *names], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def config(checkout: Path, file: str, **settings: str) -> dict:
    """A compose file, as Compose understands it."""
    done = Service(checkout, file, **settings).compose("config", "--format", "json")
    return json.loads(done.stdout)


def started(command: list[str], monkeypatch, **settings: str):
    """What torchrun, and amp-lab within it, take a command for: the settings of both."""
    for name, value in ({"OMP_NUM_THREADS": "1"} | settings).items():
        monkeypatch.setenv(name, value)
    assert command[0] == "torchrun"
    asked = parse_args(command[1:])
    launch, _, arguments = config_from_args(asked)
    assert asked.module
    assert asked.training_script == "amp_lab"
    return launch, _parser().parse_args(arguments[arguments.index("train") :])


@pytest.fixture(scope="module")
def whole(image) -> Cluster:
    """A run that nothing happened to."""
    cluster = Cluster(image, "whole")
    try:
        cluster.up()
        cluster.wait(cluster.have_ended, "ended", seconds=300)
        yield cluster
    finally:
        cluster.compose("down", "--timeout", "5", check=False)


def parts_of_the_result(state, path: str = "") -> dict[str, object]:
    """All that is in a checkpoint, but for the times that were measured."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {path: state}
    parts = {}
    for key, value in items:
        if key not in ("seconds", "images_per_s"):
            parts |= parts_of_the_result(value, f"{path}/{key}")
    return parts


def assert_same_result(folder: Path, other: Path) -> None:
    mine, others = (
        parts_of_the_result(load_checkpoint(place / "checkpoint.pt")) for place in (folder, other)
    )
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, others[name]), name


def test_a_node_is_as_safe_as_the_notebooks_server(checkout):
    lab = config(checkout, "docker/compose.yaml")["services"]["lab"]
    cluster = config(checkout, COMPOSE)
    own = {"command", "entrypoint", "environment", "healthcheck", "hostname", "networks", "restart"}
    assert cluster["services"].keys() == set(NODES)
    for name, node in cluster["services"].items():
        assert node.keys() - own == lab.keys() - own - {"ports"}
        for setting in node.keys() - own:
            assert node[setting] == lab[setting], (name, setting)
        assert node["networks"].keys() == {"cluster"}
        assert node["restart"] == "on-failure:3"
    assert cluster["networks"]["cluster"]["internal"] is True


def test_both_nodes_start_what_was_asked_for(checkout, monkeypatch):
    asked = {
        "AMP_LAB_TRAIN": "--dataset cifar10 --model resnet18",
        "AMP_LAB_EPOCHS": "3",
        "AMP_LAB_PARALLEL": "fsdp",
        "AMP_LAB_PROCESSES": "4",
        "AMP_LAB_RUN": "x",
        "AMP_LAB_TIMEOUT": "20",
        "AMP_LAB_RESTART": "no",
        "OMP_NUM_THREADS": "2",
    }
    nodes = config(checkout, COMPOSE, **asked)["services"]
    assert nodes["node0"]["command"] == nodes["node1"]["command"]
    for name in NODES:
        assert nodes[name]["restart"] == "no"
        assert nodes[name]["environment"]["OMP_NUM_THREADS"] == "2"
    launch, train = started(nodes["node1"]["command"], monkeypatch)
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (2, 2, 4)
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "node0:29400")
    assert launch.rdzv_configs["join_timeout"] == launch.rdzv_configs["read_timeout"] == "20"
    assert (train.dataset, train.model, train.epochs, train.parallel, train.timeout) == (
        *("cifar10", "resnet18", 3, "fsdp", 20),
    )
    assert (train.out, train.resume) == ("data/runs/x", True)


def test_without_settings_it_trains_on_the_digits(checkout, monkeypatch):
    nodes = config(checkout, COMPOSE)["services"]
    launch, train = started(nodes["node0"]["command"], monkeypatch)
    assert (launch.nproc_per_node, train.dataset, train.parallel) == (1, "digits", "ddp")
    assert (train.epochs, train.out, train.timeout) == (15, "data/runs/cluster", 60)


def test_two_nodes_train_one_model(whole):
    assert whole.exit_codes() == [0, 0]
    assert whole.epochs_done() == EPOCHS
    assert "2 ddp processes" in whole.sentence("node0")
    assert f"Trained {EPOCHS} epochs" in whole.sentence("node0")
    assert "epoch" not in whole.sentence("node1")  # one of them speaks for both
    ranks = load_checkpoint(whole.folder / "checkpoint.pt")["ranks"]
    assert len(ranks) == 2  # and each node had but one process
    assert not torch.equal(*(rank["random"]["torch"] for rank in ranks))


def test_the_network_leads_nowhere_else(whole):
    network = f"{whole.project}_cluster"
    assert inspected("network", network)[0]["Internal"] is True
    for node in whole.nodes():
        assert node["NetworkSettings"]["Networks"].keys() == {network}
        assert not node["HostConfig"]["PortBindings"]


def test_a_lost_node_ends_the_other_and_comes_back(image, whole):
    cluster = Cluster(image, "disturbed")
    try:
        cluster.up()
        cluster.wait((cluster.folder / "checkpoint.pt").exists, "saved", seconds=300)
        cluster.compose("kill", "node1")
        cluster.wait(lambda: cluster.nodes()[0]["RestartCount"], "ended and started again", 120)
        assert cluster.epochs_done() < EPOCHS
        said = cluster.sentence("node0")
        assert said.count("amp-lab train: rank 0: no answer from another process (") == 1
        assert "src/amp_lab" not in said  # no traceback of this package
        assert cluster.nodes()[1]["State"]["ExitCode"] == 128 + signal.SIGKILL

        cluster.up()  # node0 waits already
        cluster.wait(cluster.have_ended, "ended", seconds=300)
        assert cluster.exit_codes() == [0, 0]
        assert cluster.sentence("node0").count("Resuming in epoch") == 1
    finally:
        cluster.compose("down", "--timeout", "5", check=False)
    assert_same_result(cluster.folder, whole.folder)


class Slurm:
    """Runs the SLURM file as SLURM would, with stand-ins for its commands, which are noted."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, does in STAND_INS.items():
            note = r"""{ printf '%s\n' "${0##*/}" "$@"; echo; } >> "$NOTES/commands" """
            (folder / name).write_text(f"#!/bin/sh\n{note}\n{does}\n")
            (folder / name).chmod(0o755)

    def submit(self, *arguments: str, **settings: str) -> subprocess.Popen:
        given = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "NOTES": str(self.folder),
            "SLURM_JOB_ID": "31234",
            "SLURM_JOB_NODELIST": "m[4-7]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_CPUS_PER_TASK": "8",
        }
        return subprocess.Popen(["bash", SLURM, *arguments], cwd=self.folder, env=given | settings)

    def commands(self) -> list[list[str]]:
        notes = self.folder / "commands"
        text = notes.read_text() if notes.exists() else ""
        return [command.splitlines() for command in text.split("\n\n") if command]


@pytest.fixture
def slurm(tmp_path) -> Slurm:
    return Slurm(tmp_path)


def test_slurm_starts_torchrun_once_a_machine(slurm, monkeypatch):
    asked = ("--dataset", "cifar10", "--parallel", "fsdp", "--out", "runs/a folder")
    assert slurm.submit(*asked, SLURM_GPUS_ON_NODE="2").wait(timeout=60) == 0
    hosts, srun = slurm.commands()
    assert hosts == ["scontrol", "show", "hostnames", "m[4-7]"]
    assert srun[:3] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
    launch, train = started(srun[3:], monkeypatch)
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (4, 4, 2)
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "m4:21234")
    assert (launch.run_id, launch.max_restarts) == ("31234", 3)
    assert (train.dataset, train.parallel, train.out) == ("cifar10", "fsdp", "runs/a folder")
    assert train.resume


def test_slurm_gets_the_exit_code_of_a_failure(slurm):
    assert slurm.submit("--out", "x", STEP_TAKES="not a number").wait(timeout=60) != 0
    assert slurm.commands()[-1][0] == "srun"  # and the job is not queued again


def test_slurm_saves_and_queues_again_when_the_time_is_nearly_up(slurm):
    script = slurm.submit("--out", "x", STEP_TAKES="90")
    end = time.monotonic() + 60
    while not (slurm.folder / "step").exists():
        assert time.monotonic() < end, slurm.commands()
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    script.wait(timeout=60)
    assert slurm.commands()[2:] == [
        ["scancel", "--signal=TERM", "31234"],
        ["scontrol", "requeue", "31234"],
    ]


def test_slurm_reads_each_of_its_options():
    lines = SLURM.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert len(options) == 8
    for line in options[1:]:  # the first is the name
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)? +# .+", line), line
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines.index(options[-1]) < first_command  # sbatch reads no further
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, dict]:
    """The objects of the Kubernetes file, by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


def test_kubernetes_objects_refer_to_each_other(kubernetes):
    assert kubernetes.keys() == {"PersistentVolumeClaim", "TrainingRuntime", "TrainJob"}
    for kind in ("TrainingRuntime", "TrainJob"):
        assert kubernetes[kind]["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    names = {kind: each["metadata"]["name"] for kind, each in kubernetes.items()}
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names.values())
    assert kubernetes["TrainJob"]["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": names["TrainingRuntime"],
    }
    claims = [v.get("persistentVolumeClaim") for v in pod(kubernetes)["volumes"]]
    assert [claim["claimName"] for claim in claims if claim] == [names["PersistentVolumeClaim"]]
    assert kubernetes["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_kubernetes_uses_fields_that_the_trainer_knows(kubernetes):
    for path, known in TRAINER_FIELDS.items():
        kind, *keys = path.split(".")
        value = kubernetes[kind]
        for key in keys:
            value = value[key]
        assert value.keys() <= known, path
    job = replicated_job(kubernetes)
    assert job["name"] == "node"
    assert job["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert [container["name"] for container in pod(kubernetes)["containers"]] == ["node"]


def test_a_pod_is_nobody_in_particular_and_writes_only_where_it_may(kubernetes):
    inside = pod(kubernetes)
    assert inside["securityContext"]["runAsNonRoot"] is True
    assert inside["securityContext"]["runAsUser"] == 1000
    assert inside["automountServiceAccountToken"] is False
    (container,) = inside["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {"/work/runs", "/dev/shm", "/tmp", "/home/lab"}
    assert set(mounts.values()) == {volume["name"] for volume in inside["volumes"]}


def test_kubernetes_starts_torchrun_in_each_pod(kubernetes, monkeypatch):
    trainer = kubernetes["TrainJob"]["spec"]["trainer"]
    assert trainer["command"][:2] == ["tini", "--"]
    by_the_trainer = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
    }
    assert not by_the_trainer.keys() & {variable["name"] for variable in trainer["env"]}
    command = [*trainer["command"][2:], *trainer["args"]]
    launch, train = started(command, monkeypatch, **by_the_trainer)
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (2, 2, 2)
    assert launch.rdzv_endpoint == "digits-node-0-0.digits:29500"
    assert launch.rdzv_configs["rank"] == 1
    assert launch.max_restarts == 0  # a lost pod is the JobSet's to replace, with all others
    assert replicated_job(kubernetes)["template"]["spec"]["backoffLimit"] == 0
    assert (Path("/work") / train.out).is_relative_to("/work/runs")
    assert train.data is None  # the digits come with a library, and all else is read-only
    assert train.resume
    assert trainer["resourcesPerNode"]["requests"] == trainer["resourcesPerNode"]["limits"]


def replicated_job(kubernetes: dict[str, dict]) -> dict:
    (job,) = kubernetes["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return job


def pod(kubernetes: dict[str, dict]) -> dict:
    return replicated_job(kubernetes)["template"]["spec"]["template"]["spec"]
