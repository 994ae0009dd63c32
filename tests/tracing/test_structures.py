"""Inputs that are objects with tensors in them: batches of graphs, records, mappings."""

import collections
import dataclasses
import threading
import types
from typing import Any, NamedTuple

import pytest
import torch
from remedy_tests import says
from torch import nn

from amp_lab import forecast_inference, forecast_memory, xray
from amp_lab.core.errors import TraceError
from amp_lab.core.tensors import map_tensors, named_tensors
from amp_lab.model_call import ModelCall
from amp_lab.tracing.memory import memory_table

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


class Store(collections.UserDict):
    """The tensors of a graph, as PyTorch Geometric keeps them."""


class Graph:
    """A batch of graphs, as PyTorch Geometric's, which can be called and knows its owner."""

    def __init__(self, **tensors):
        self._store = Store(tensors)
        self.owner = self

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def __call__(self, *names):
        return [self._store[name] for name in names]

    def to(self, device):
        return Graph(**{name: tensor.to(device) for name, tensor in self._store.items()})


class Slotted:
    __slots__ = ("edge_index", "x")

    def __init__(self, x, edge_index):
        self.x, self.edge_index = x, edge_index


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    edge_index: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    edge_index: torch.Tensor


class Batch(collections.UserDict):
    """A mapping with attributes, as transformers' `BatchEncoding` is."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Layer(nn.Module):
    """The sum over the neighbours of each node, and only of nodes that are positive."""

    def __init__(self, chooses=False):
        super().__init__()
        self.layer, self.chooses = nn.Linear(8, 8), chooses

    def forward(self, graph):
        h = self.layer(graph.x)
        source, target = graph.edge_index
        out = torch.zeros_like(h).index_add(0, target, h[source])
        return out[out[:, 0] > 0] if self.chooses else out


def tensors() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 8), "edge_index": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])}


KINDS = {
    "graph": Graph,
    "slots": Slotted,
    "dataclass": Record,
    "named tuple": Pair,
    "mapping": Batch,
    "namespace": types.SimpleNamespace,
}


@pytest.fixture(params=KINDS)
def graph(request):
    return KINDS[request.param](**tensors())


def test_each_tensor_is_mapped_in_a_copy(graph):
    given = named_tensors(graph, open_objects=True)
    mapped = map_tensors(lambda tensor: tensor.to("meta"), (graph,))[0]
    assert type(mapped) is type(graph)
    assert mapped.x.is_meta
    assert mapped.edge_index.is_meta
    assert named_tensors(graph, open_objects=True) == given  # the very same tensors
    assert sorted(tuple(tensor.shape) for _, tensor in given) == [(2, 4), (5, 8)]


def test_it_is_an_input_as_others(graph):
    model = Layer()
    fake, real = (xray(model, graph, device_type="cpu", real=real) for real in (False, True))
    assert fake.rows == real.rows
    assert any("input" in cast.what for cast in xray(model, graph).casts)
    plain = forecast_memory(model, Pair(**tensors()), precision="bf16")
    found = forecast_memory(model, graph, precision="bf16")
    assert found.peak == plain.peak
    assert sorted(found.input_shapes) == [(2, 4), (5, 8)]
    served, plain = (
        forecast_inference(model, given, precision="bf16") for given in (graph, Pair(**tensors()))
    )
    assert served.peak == plain.peak


def test_values_in_it_decide(graph):
    model = Layer(chooses=True)
    assert "1 decision" in xray(model, graph).decisions
    assert "1 decision" in str(forecast_memory(model, graph, precision="fp16"))
    on_meta = map_tensors(lambda tensor: tensor.to("meta"), graph)
    with pytest.raises(TraceError, match="an input is on 'meta'"):
        xray(model, on_meta)


def test_a_batch_of_graphs_grows_with_its_nodes():
    call = ModelCall(Layer(), (Graph(**tensors()),))
    assert (call.batch, call.fixed_shapes) == (5, ((2, 4),))
    table = memory_table(call, precisions=["fp32"], memory_bytes="1MiB")
    assert table.largest["fp32"] > 5


def test_the_owner_and_other_attributes_are_those_of_the_copy():
    graph = Graph(**tensors())
    graph.names, graph.layer = ["a"], nn.Linear(2, 2)
    mapped = map_tensors(torch.zeros_like, graph)
    assert mapped.owner is mapped
    assert mapped.names == ["a"]
    assert torch.equal(mapped.layer.weight, graph.layer.weight)  # a module is no input
    assert mapped.x.sum() == 0


def test_an_object_without_tensors_is_passed_as_it_is():
    settings = types.SimpleNamespace(size=2, lock=threading.Lock(), kind=nn.Linear)
    assert map_tensors(torch.zeros_like, [settings])[0] is settings


class Hidden:
    """Moves to a device, and shows nothing."""

    __slots__ = ()

    def to(self, device):
        return self


def locked() -> Any:
    graph = Graph(**tensors())
    graph.lock = threading.Lock()
    return graph


REFUSED = {
    "cannot be copied": locked,
    "cannot be found": Hidden,
    "a mappingproxy cannot be copied": lambda: types.MappingProxyType(tensors()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_others_are_refused_in_a_line(words):
    with pytest.raises(TraceError, match=words) as refused:
        forecast_memory(Layer(), REFUSED[words](), precision="fp32")
    assert "\n" not in str(refused.value)
    assert says("trace.give_tensors", str(refused.value))
