"""`tools/behaviour.py` shows what differs between two recordings, and nothing else."""

import json

import pytest
import torch

import behaviour

BEFORE = {"ops": {"cuda": ["mm: lower", "sum: fp32"]}, "runs": {"state": "ab"}}


def test_two_equal_recordings_differ_in_nothing():
    assert list(behaviour.differences(BEFORE, json.loads(json.dumps(BEFORE)))) == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (
            {"ops": {"cuda": ["mm: lower", "sum: bf16"]}, "runs": {"state": "ab"}},
            ["ops / cuda", "    - sum: fp32", "    + sum: bf16"],
        ),
        ({"ops": {}, "runs": {"state": "ab"}}, ["ops / cuda: only before"]),
        (BEFORE | {"faults": {"an inf": "none"}}, ["faults: only after"]),
        (BEFORE | {"runs": {"state": "cd"}}, ["runs / state", "    - ab", "    + cd"]),
    ],
)
def test_what_differs_is_named_with_its_lines(after, expected):
    assert list(behaviour.differences(BEFORE, after)) == expected


def test_a_command_is_recorded_with_its_code_and_both_streams():
    refused = behaviour.printed(["xray", "nothing"])
    assert (refused["code"], refused["out"]) == (2, [])
    assert refused["err"][0].startswith("amp-lab xray: ")
    version = behaviour.printed(["--version"])
    assert (version["code"], version["err"]) == (0, [])
    assert len(version["out"]) == 1


def test_folders_and_speeds_are_left_out():
    told = "Trained 2 epochs in 3.1 s, perplexity 34.88  1,200 tokens/s, peak memory 1857 MiB"
    cleaned = behaviour.cleaned([f"/tmp/x/run: {told}"], "/tmp/x")
    later = told.replace("3.1", "4.0").replace("1,200", "900").replace("1857", "1771")
    assert behaviour.cleaned([f"/tmp/y/run: {later}"], "/tmp/y") == cleaned
    assert "34.88" in cleaned[0]


def test_a_digest_is_of_names_and_values():
    one = {"weight": torch.ones(2), "bias": torch.zeros(1)}
    assert behaviour.digest(one) == behaviour.digest(dict(reversed(one.items())))
    assert behaviour.digest(one) != behaviour.digest(one | {"bias": torch.ones(1)})


def test_what_raises_is_an_outcome():
    assert behaviour.outcome_of(lambda: 1 // 1) == 1
    assert behaviour.outcome_of(lambda: {}["key"]) == "KeyError: 'key'"
