"""Graph models of PyTorch Geometric, each on a `Batch` of two graphs."""

import importlib

import torch
from torch import nn

FEATURES = 8


class OnBatch(nn.Module):
    """The mean over the nodes of each graph, (graphs, classes)."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nodes

    def forward(self, batch):
        pool = importlib.import_module("torch_geometric.nn").global_mean_pool
        return pool(self.nodes(batch.x, batch.edge_index), batch.batch)


def graph(nodes):
    edges = torch.randint(0, nodes, (2, 3 * nodes))
    data = importlib.import_module("torch_geometric.data")
    return data.Data(torch.randn(nodes, FEATURES), edges)


def build(name):
    data = importlib.import_module("torch_geometric.data")
    kind = getattr(importlib.import_module("torch_geometric.nn"), name)
    graphs = [graph(nodes) for nodes in (5, 7)]
    batch = data.Batch.from_data_list(graphs)
    model = OnBatch(kind(FEATURES, hidden_channels=16, num_layers=2, out_channels=4))
    return model, (batch,), {}


MODELS = {
    f"geometric {name}": lambda name=name: build(name) for name in ("GCN", "GAT", "GraphSAGE")
}
