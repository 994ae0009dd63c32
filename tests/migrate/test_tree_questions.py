"""The questions about a file that rules share, and the list of them."""

import importlib
import inspect
import pkgutil
import re

import pytest

from amp_lab.migrate import tree
from amp_lab.migrate.tree.float16_values import casts_to_float16, is_model, is_under_no_grad
from amp_lab.migrate.tree.nodes import name_parts
from amp_lab.migrate.tree.python_tree import Tree
from amp_lab.migrate.tree.rewriter import Rewriter

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    pass

first = Net().cuda()
other = load()
weights = first.to(torch.float16)
half = other.half()
wide = first.to(torch.float32)

@torch.no_grad()
def evaluate(model):
    model(1)

def train(model):
    model(2)
    with torch.inference_mode():
        model(3)
"""


@pytest.fixture
def file():
    return Rewriter(Tree(PROGRAM))


def test_the_list_of_questions_names_what_is_there():
    modules = [info.name for info in pkgutil.iter_modules(tree.__path__)]
    code = ""
    for name in modules:
        code += inspect.getsource(importlib.import_module(f"{tree.__name__}.{name}"))
    names = set(re.findall(r"(?:def|class) (\w+)|self\.(\w+)", code))
    known = {"file", *modules}.union(*names)
    for answer in re.findall(r"(?<!`)`([\w.]+)`(?!`)", tree.__doc__):
        assert known.issuperset(answer.split(".")), answer


def test_weights_that_are_cast_to_float16_are_known(file):
    calls = [call for call in file.tree.calls if casts_to_float16(file.code, call)]
    assert [file.tree.code(call) for call in calls] == ["first.to(torch.float16)", "other.half()"]


def test_a_call_under_no_grad_is_known(file):
    calls = {file.tree.code(event.node): event for event in file.code.events}
    without = {code: is_under_no_grad(file.code, event) for code, event in calls.items()}
    assert (without["model(1)"], without["model(2)"], without["model(3)"]) == (True, False, True)


def test_a_model_is_known_by_its_class_or_its_name(file):
    answers = {}
    for call, scope in file.tree.calls.items():
        parts = name_parts(call.func)
        if parts is not None:
            answers[parts] = is_model(file.code, parts, scope)
    assert answers["model",]
    assert not answers["load",]
    scope = file.tree.scopes[0]
    assert is_model(file.code, ("first",), scope)
    assert not is_model(file.code, ("other",), scope)
