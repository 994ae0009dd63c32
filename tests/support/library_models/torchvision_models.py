"""Models of torchvision: classification, segmentation, video, detection and optical flow."""

import torch
import torchvision.models as tv
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

CLASSIFIERS = {
    "resnet50": {},
    "densenet121": {},
    "mobilenet_v2": {},
    "regnet_y_400mf": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
}
WITHOUT_WEIGHTS = {"weights": None, "weights_backbone": None}
SMALL_IMAGE = {"min_size": 64, "max_size": 64}
# Fewer proposals than those from which the CPU and cuda suppress overlapping boxes in other ways.
FEW_PROPOSALS = {"rpn_pre_nms_top_n_train": 100, "rpn_post_nms_top_n_train": 50}


def classifier(name):
    return getattr(tv, name)(weights=None, **CLASSIFIERS[name]), (torch.randn(2, 3, 64, 64),), {}


def deeplab():
    model = tv.segmentation.deeplabv3_mobilenet_v3_large(**WITHOUT_WEIGHTS)
    return model, (torch.randn(2, 3, 64, 64),), {}


def r3d():
    return tv.video.r3d_18(weights=None), (torch.randn(1, 3, 4, 32, 32),), {}


def raft():
    images = torch.rand(2, 1, 3, 128, 128) * 2 - 1
    return tv.optical_flow.raft_small(weights=None), (*images,), {"num_flow_updates": 2}


def pyramid(**options):
    norm = torch.nn.BatchNorm2d
    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=norm, **options)


def pyramid_of_dense_boxes():
    return pyramid(returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256))


def detector(model, images=1, **targets):
    """A detector with some images and their boxes, of which it makes its losses."""
    targets |= {"boxes": torch.tensor([[1.0, 1, 40, 40]]), "labels": torch.tensor([1])}
    return model, ([torch.rand(3, 64, 64) for _ in range(images)], [targets] * images), {}


def fasterrcnn():
    build = detection.fasterrcnn_mobilenet_v3_large_320_fpn
    return detector(build(num_classes=5, **WITHOUT_WEIGHTS))


def small_fasterrcnn():
    build = detection.fasterrcnn_mobilenet_v3_large_320_fpn
    return detector(build(num_classes=5, **WITHOUT_WEIGHTS, **SMALL_IMAGE, **FEW_PROPOSALS))


def maskrcnn():
    model = detection.MaskRCNN(pyramid(), num_classes=5, **SMALL_IMAGE, **FEW_PROPOSALS)
    mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
    mask[:, 1:40, 1:40] = 1
    return detector(model, masks=mask)


def retinanet():
    return detector(detection.RetinaNet(pyramid_of_dense_boxes(), num_classes=5, **SMALL_IMAGE))


def fcos():
    return detector(detection.FCOS(pyramid_of_dense_boxes(), num_classes=5, **SMALL_IMAGE))


def ssdlite():
    model = detection.ssdlite320_mobilenet_v3_large(num_classes=5, **WITHOUT_WEIGHTS)
    return detector(model, images=2)  # its last map has one value, and batch norm needs several


DETECTORS = {
    "torchvision fasterrcnn": fasterrcnn,
    "torchvision fasterrcnn, few proposals": small_fasterrcnn,
    "torchvision maskrcnn": maskrcnn,
    "torchvision retinanet": retinanet,
    "torchvision fcos": fcos,
    "torchvision ssdlite": ssdlite,
}
TRAINED = set(DETECTORS)
MODELS = {f"torchvision {name}": lambda name=name: classifier(name) for name in CLASSIFIERS}
MODELS |= {"torchvision deeplab": deeplab, "torchvision r3d": r3d, "torchvision raft": raft}
MODELS |= DETECTORS
