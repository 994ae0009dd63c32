"""YOLO of ultralytics from its yaml: the outputs, and the loss that it computes itself."""

import importlib

import torch

TRAINED = {"yolo, its loss"}


def net():
    library = importlib.import_module("ultralytics.nn.tasks")
    return library.DetectionModel("yolo11n.yaml", nc=5, verbose=False)


def yolo():
    return net(), (torch.rand(2, 3, 64, 64),), {}


def with_loss():
    model = net()
    model.args = importlib.import_module("ultralytics.cfg").get_cfg()
    batch = {"img": torch.rand(2, 3, 64, 64), "batch_idx": torch.tensor([0.0, 1.0])}
    batch |= {"cls": torch.tensor([[1.0], [2.0]]), "bboxes": torch.full((2, 4), 0.5)}
    return model, (batch,), {}


MODELS = {"yolo": yolo, "yolo, its loss": with_loss}
