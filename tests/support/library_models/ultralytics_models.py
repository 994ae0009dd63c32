"""YOLO of ultralytics from its yaml: features in training, predictions in evaluation."""

import importlib

import torch

TRAINED = {"yolo"}


def yolo():
    library = importlib.import_module("ultralytics.nn.tasks")
    return library.DetectionModel("yolo11n.yaml", verbose=False), (torch.rand(2, 3, 64, 64),), {}


MODELS = {"yolo": yolo, "yolo, predictions": yolo}
