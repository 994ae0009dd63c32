"""GitHub's workflows run only code that is pinned, and no job has more rights than it needs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

pytestmark = pytest.mark.skipif(
    not WORKFLOWS, reason="a whole checkout: an image has no .ci and no .github"
)


def actions(text: str) -> list[str]:
    """What the text of a workflow uses, with the comment behind it."""
    return re.findall(r"^\s*(?:- )?uses:\s*(.+?)\s*$", text, re.MULTILINE)


def unpinned_actions(text: str) -> list[str]:
    """The actions whose code can change: no full commit SHA, or no comment with its version."""
    return [action for action in actions(text) if not PINNED.fullmatch(action)]


def has_identity(job: dict, workflow: dict) -> bool:
    """Whether a job may ask GitHub for a token that proves which workflow it is."""
    permissions = job.get("permissions", workflow.get("permissions", "write-all"))
    if isinstance(permissions, str):
        return permissions == "write-all"
    return permissions.get("id-token") == "write"


def commands_with_identity(text: str) -> list[str]:
    """The names of jobs that have such a token and also run commands, such as `pip install`."""
    workflow = yaml.safe_load(text)
    return [
        name
        for name, job in workflow["jobs"].items()
        if has_identity(job, workflow) and any("run" in step for step in job["steps"])
    ]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def text(request) -> str:
    """A workflow of ours."""
    return request.param.read_text()


def test_every_action_is_pinned(text):
    assert actions(text)
    assert unpinned_actions(text) == []


def test_an_action_has_one_version_in_all_workflows():
    used = {action for path in WORKFLOWS for action in actions(path.read_text())}
    names = [action.split("@")[0] for action in used]
    assert len(names) == len(set(names)), sorted(used)


def test_a_job_that_can_prove_its_identity_runs_no_command(text):
    assert commands_with_identity(text) == []


def test_a_workflow_can_only_read_unless_a_job_asks_for_more(text):
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_no_checkout_keeps_the_token(text):
    for name, job in yaml.safe_load(text)["jobs"].items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step.get("with", {}).get("persist-credentials") is False, name


@pytest.mark.parametrize(
    "action",
    [
        "actions/checkout@v4",
        "pypa/gh-action-pypi-publish@release/v1",
        f"actions/checkout@{'a' * 39} # v4.0.0",
        f"actions/checkout@{'a' * 40}",
    ],
)
def test_an_action_that_is_not_pinned_is_found(action):
    assert unpinned_actions(f"    steps:\n      - uses: {action}\n") == [action]


@pytest.mark.parametrize(
    "permissions",
    [
        "permissions: {contents: read, id-token: write}\njobs:\n  x:\n",
        "permissions: write-all\njobs:\n  x:\n",
        "permissions: {contents: read}\njobs:\n  x:\n    permissions: {id-token: write}\n",
        "jobs:\n  x:\n",  # what GitHub gives a workflow that names none depends on the repository
    ],
)
def test_a_job_with_an_identity_that_installs_packages_is_found(permissions):
    assert commands_with_identity(f"{permissions}    steps:\n      - run: pip install x\n") == ["x"]


def test_what_builds_the_published_files_is_pinned_by_hash():
    requirements = (ROOT / ".github" / "requirements" / "build.txt").read_text()
    names = re.findall(r"^([\w-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", requirements, re.M)
    assert {"build", "pdm-backend"} <= set(names)
    assert len(names) == len(re.findall(r"^[\w-]+==", requirements, re.M))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.rocm"])
def test_a_base_image_has_a_version(name):
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "docker" / name).read_text(), re.MULTILINE)
    _, _, tag = base.partition(":")
    assert re.search(r"\d+\.\d+", tag), base
