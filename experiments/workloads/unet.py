"""U-Net (Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015).

Figure 1 of the paper: on the way down twice a 3x3 convolution without padding and ReLU, then 2x2 max-pool; 64 to 1024
channels; on the way up a 2x2 up-convolution that halves the channels, the concatenation with the cropped feature map
from the way down, and two 3x3 convolutions with ReLU; at the end a 1x1 convolution to two classes. An image of 572
pixels gives a map of 388. Cross-entropy over the softmax of every pixel; SGD with momentum 0.99 (section 3).
Open in the paper, or not followed (experiments/workloads/README.md):

1. Dropout "at the end of the contracting path": here 0.5 after the last two levels of the way down.
2. The weight of every pixel in the loss (equation 2), one number per pixel, is left out.
3. The batch is 8; the paper takes one image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError
from experiments.workloads.vgg import Dropout

WIDTHS = (64, 128, 256, 512, 1024)


class Twice(nn.Sequential):
    """Two 3x3 convolutions without padding, each with ReLU: 4 pixels less a side."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())


class UNet(nn.Module):
    """Images ``[batch, 1, size, size]`` to logits ``[batch, classes, output(size), output(size)]``."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(c, w) for c, w in zip((1, *WIDTHS), WIDTHS, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in WIDTHS[:0:-1])
        self.merge = nn.ModuleList(Twice(w, w // 2) for w in WIDTHS[:0:-1])
        self.pool, self.dropout = nn.MaxPool2d(2), Dropout(0.5)
        self.classify = nn.Conv2d(WIDTHS[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, convolutions in enumerate(self.down):
            x = convolutions(self.pool(x) if i else x)
            if i >= len(self.down) - 2:
                x = self.dropout(x)
            kept.append(x)
        for up, convolutions, left in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = up(x)
            size = x.shape[-1]
            edge = (left.shape[-1] - size) // 2
            x = convolutions(torch.cat([left[..., edge : edge + size, edge : edge + size], x], dim=1))
        logits: Tensor = self.classify(x)
        return logits


def output(image: int) -> int:
    """Side of the map that an image of side ``image`` gives: 388 for 572.

    Raises:
        WorkloadError: a 2x2 pool would meet an odd side, or nothing is left.
    """
    size = image
    for _ in WIDTHS[1:]:
        size -= 4
        if size % 2 or size <= 0:
            lower = image - (image - 12) % 16
            raise WorkloadError(
                f"workload.image: every 2x2 pool needs an even side, as with {max(lower, 188)} or "
                f"{max(lower + 16, 204)}, got {image}"
            )
        size //= 2
    size -= 4
    for _ in WIDTHS[1:]:
        size = 2 * size - 4
    if size <= 0:
        raise WorkloadError(f"workload.image: expected at least 188 pixels, got {image}")
    return size


def build(*, batch_size: int = 8, image: int = 572) -> Parts:
    """Images of one channel with two classes per pixel.

    Raises:
        WorkloadError: a side that the network cannot take.
    """
    side = output(image)
    model = UNet()
    batch = torch.empty(batch_size, 1, image, image), torch.empty(batch_size, side, side, dtype=torch.int64)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99), batch
