"""Models of torchvision: of classes, boxes and pixels; with random weights, as small as they can be made."""

from __future__ import annotations

from typing import Any

import torch
from subject import Subject, classes, pairs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision import models
from torchvision.models import detection, segmentation
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from fl_elastic.losses import classification_loss


def _of_size(size: int) -> Any:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 3, size, size, generator=generator), classes(generator)

    return batch


def resnet18() -> Subject:
    return pairs(models.resnet18(num_classes=3), cross_entropy, _of_size(32))


def mobilenet_v3_small() -> Subject:
    return pairs(models.mobilenet_v3_small(num_classes=3), cross_entropy, _of_size(32))


def shufflenet() -> Subject:
    return pairs(models.shufflenet_v2_x0_5(num_classes=3), cross_entropy, _of_size(32))


def squeezenet() -> Subject:
    return pairs(models.squeezenet1_1(num_classes=3), cross_entropy, _of_size(32))


def densenet() -> Subject:
    model = models.DenseNet(4, (2, 2), 8, num_classes=3, drop_rate=0.2)
    return pairs(model, cross_entropy, _of_size(32))


def googlenet_auxiliary_heads() -> Subject:
    """Three outputs, of which two count less."""
    model = models.googlenet(num_classes=3, aux_logits=True, init_weights=False)
    return pairs(model, classification_loss, _of_size(64))


def swin_v2() -> Subject:
    model = models.SwinTransformer(
        [4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=3, stochastic_depth_prob=0.3
    )
    return pairs(model, cross_entropy, _of_size(32))


def vision_transformer() -> Subject:
    model = models.VisionTransformer(16, 8, 2, 2, 16, 24, dropout=0.1, num_classes=3)
    return pairs(model, cross_entropy, _of_size(16))


def _pixels(outputs: Any, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs["out"], targets)
    return loss + 0.5 * cross_entropy(outputs["aux"], targets) if "aux" in outputs else loss


def _masks(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=generator), classes(generator, 3, 32, 32)


def lraspp_pixels() -> Subject:
    model = segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )
    return pairs(model, _pixels, _masks)


def deeplab_pixels() -> Subject:
    model = segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, aux_loss=True
    )
    return pairs(model, _pixels, _masks)


class _Detector(nn.Module):
    """A detector of torchvision, which wants pictures and boxes and gives a dict of losses while it trains."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: list[Tensor], boxes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.net(images, boxes)
        return found


def _sum(losses: dict[str, Tensor], targets: Any) -> Tensor:
    del targets
    return torch.stack(list(losses.values())).sum()


def _detects(net: nn.Module, size: int = 48, *, masks: bool = False) -> Subject:
    def boxes_in(generator: torch.Generator) -> dict[str, Tensor]:
        corner = torch.randint(size // 2, (2, 2), generator=generator).float()
        found = {
            "boxes": torch.cat([corner, corner + size // 3], 1),
            "labels": 1 + torch.randint(2, (2,), generator=generator),
        }
        if masks:
            found["masks"] = torch.randint(2, (2, size, size), generator=generator).byte()
        return found

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        images = [torch.rand(3, size, size, generator=generator) for _ in range(2)]
        boxes = [boxes_in(generator) for _ in images]
        return (images, boxes), boxes

    subject = pairs(_Detector(net), _sum, batch)
    return Subject(
        subject.model, subject.batches, _sum, lambda model, batch: _sum(model(*batch[0]), None)
    )


def _backbone(width: int = 16) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
    )  # fmt: skip
    body.out_channels = width  # type: ignore[assignment]
    return body


_ANCHORS = AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),))
_SIZES: dict[str, Any] = {"min_size": 48, "max_size": 48, "num_classes": 3}


def faster_rcnn_detects() -> Subject:
    pool = MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2)
    net = detection.FasterRCNN(
        _backbone(), rpn_anchor_generator=_ANCHORS, box_roi_pool=pool,
        rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=20, **_SIZES,
    )  # fmt: skip
    return _detects(net)


def mask_rcnn_detects() -> Subject:
    pools = [MultiScaleRoIAlign(["0"], output_size=size, sampling_ratio=2) for size in (3, 6)]
    net = detection.MaskRCNN(
        _backbone(), rpn_anchor_generator=_ANCHORS, box_roi_pool=pools[0], mask_roi_pool=pools[1],
        rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=20, **_SIZES,
    )  # fmt: skip
    return _detects(net, masks=True)


def retinanet_detects() -> Subject:
    return _detects(detection.RetinaNet(_backbone(), anchor_generator=_ANCHORS, **_SIZES))


def fcos_detects() -> Subject:
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return _detects(detection.FCOS(_backbone(32), anchor_generator=anchors, **_SIZES))


def ssdlite_detects() -> Subject:
    """In double precision: which of nearly equal boxes count, turns on the last digit of single."""
    net = detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )
    found = _detects(net.double(), 64)
    batches = [
        (
            ([each.double() for each in images], [_doubled(each) for each in boxes]),
            [_doubled(each) for each in boxes],
        )
        for (images, boxes), _ in found.batches
    ]
    return Subject(found.model, batches, found.loss_fn, found.loss_of)


def _doubled(boxes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: each.double() if each.is_floating_point() else each for name, each in boxes.items()
    }
