"""Image-to-map networks with skip connections: U-Net, its form for diffusion, stacked hourglasses and YOLOv3.

Unspecified details and deviations from the papers: experiments/workloads/README.md.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import Dropout, conv, counts, labels, preactivated
from experiments.workloads.module import Parts, WorkloadError


class Twice(nn.Sequential):
    """Two unpadded 3x3 convolutions with ReLU, which reduce each side by 4 pixels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())


class UNet(nn.Module):
    """U-Net for images ``[batch, 1, size, size]``, returning logits ``[batch, classes, output(size), output(size)]``.

    Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015, Figure 1.
    Down path: two unpadded 3x3 convolutions with ReLU, then 2x2 max-pool; 64 to 1024 channels. Up path: a 2x2
    up-convolution that halves the channels, concatenation with the cropped feature map of the down path, and two 3x3
    convolutions with ReLU. At the end a 1x1 convolution to two classes.

    1. Dropout "at the end of the contracting path": here 0.5 after the last two levels of the down path.
    2. The per-pixel weights in the loss (equation 2) are left out.
    3. The batch is 8; the paper takes one image.
    """

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(map(Twice, (1, *widths), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in widths[:0:-1])
        self.merge = nn.ModuleList(Twice(w, w // 2) for w in widths[:0:-1])
        self.pool = nn.MaxPool2d(2)
        self.dropout = Dropout(0.5)
        self.classify = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, convolutions in enumerate(self.down):
            x = convolutions(self.pool(x) if i else x)
            if i >= len(self.down) - 2:
                x = self.dropout(x)
            skips.append(x)
        for up, convolutions, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = up(x)
            size = x.shape[-1]
            edge = (skip.shape[-1] - size) // 2
            x = convolutions(torch.cat([skip[..., edge : edge + size, edge : edge + size], x], dim=1))
        return self.classify(x)


def output(image: int) -> int:
    """Returns the side of the output map for an image of side ``image``: 388 for 572.

    Raises:
        WorkloadError: A 2x2 pool would get an odd side, or the output would be empty.
    """
    if image % 16 != 12:
        lower = image - (image - 12) % 16
        raise WorkloadError(
            f"workload.image: every 2x2 pool needs an even side, as with {max(lower, 188)} or {max(lower + 16, 204)}, "
            f"got {image}"
        )
    if image < 188:
        raise WorkloadError(f"workload.image: expected at least 188 pixels, got {image}")
    return image - 184  # unpadded convolutions take 60 of the side on the way down, 64 at the bottom, 60 on the way up


def unet(*, batch_size: int = 8, image: int = 572) -> Parts:
    """Returns U-Net with one-channel images and two classes per pixel; SGD with momentum 0.99 (section 3).

    Raises:
        WorkloadError: The network does not support this side of the image.
    """
    side = output(image)
    model = UNet()
    batch = torch.empty(batch_size, 1, image, image), labels(batch_size, side, side)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99), batch


# --------------------------------------------------------------------------------- U-Net for diffusion


class DiffusionBlock(nn.Module):
    """Two preactivated 3x3 convolutions with group norm, SiLU and the time's embedding, and a residual connection."""

    def __init__(self, channels: int, width: int, embedding: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, width, 3, padding=1))
        self.of_time = nn.Sequential(nn.SiLU(), nn.Linear(embedding, width))
        self.second = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), Dropout(dropout), nn.Conv2d(width, width, 3, padding=1)
        )
        self.shortcut = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) + self.of_time(time)[:, :, None, None]
        return self.shortcut(x) + self.second(hidden)


class PixelAttention(nn.Module):
    """Attention with one head among the pixels of a map, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.query, self.key, self.value, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        query, key, value = (part(hidden).flatten(2) for part in (self.query, self.key, self.value))
        weights = (query.transpose(1, 2) @ key * x.shape[1] ** -0.5).softmax(2)
        return x + self.out((value @ weights.transpose(1, 2)).view_as(x))


class DiffusionUNet(nn.Module):
    """Network that predicts the noise in images ``[batch, 3, image, image]``.

    Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020, Appendix B; sizes from its code
    (hojonathanho/diffusion). 35.7 million parameters with the defaults. Timesteps are 0, 1, … instead of drawn ones.
    """

    def __init__(
        self, width: int, factors: tuple[int, ...], blocks: int, image: int, batch: int, dropout: float
    ) -> None:
        super().__init__()
        embedding = 4 * width
        self.width = width
        self.register_buffer("times", torch.arange(batch, dtype=torch.float32), persistent=False)
        self.embed = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        skips = [width]
        channels = width
        for level, factor in enumerate(factors):
            for _ in range(blocks):
                self.down.append(self._block(channels, factor * width, embedding, dropout, image >> level == 16))
                channels = factor * width
                skips.append(channels)
            if level < len(factors) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                skips.append(channels)
        self.middle = nn.ModuleList(
            self._block(channels, channels, embedding, dropout, has_attention) for has_attention in (True, False)
        )
        for level, factor in reversed(list(enumerate(factors))):
            for _ in range(blocks + 1):
                inputs = channels + skips.pop()
                self.up.append(self._block(inputs, factor * width, embedding, dropout, image >> level == 16))
                channels = factor * width
            if level:
                self.up.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    @staticmethod
    def _block(channels: int, width: int, embedding: int, dropout: float, has_attention: bool) -> nn.ModuleList:
        """Returns a residual block, with attention after it if chosen."""
        block = DiffusionBlock(channels, width, embedding, dropout)
        return nn.ModuleList([block, PixelAttention(width)] if has_attention else [block])

    def forward(self, x: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000) / (half - 1)))
        angles = self.times[:, None] * rates
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        x = self.stem(x)
        skips = [x]
        for part in self.down:
            x = self._apply(part, x, time)
            skips.append(x)
        for part in self.middle:
            x = self._apply(part, x, time)
        for part in self.up:
            if isinstance(part, nn.Conv2d):
                x = part(F.interpolate(x, scale_factor=2))
            else:
                x = self._apply(part, torch.cat([x, skips.pop()], 1), time)
        return self.out(x)

    @staticmethod
    def _apply(part: nn.Module, x: Tensor, time: Tensor) -> Tensor:
        """Returns a strided convolution's output, or that of a residual block and its attention."""
        if isinstance(part, nn.Conv2d):
            return part(x)
        assert isinstance(part, nn.ModuleList)
        x = part[0](x, time)
        return part[1](x) if len(part) > 1 else x


def diffusion_unet(
    *,
    width: int = 128,
    stages: str = "1-2-2-2",
    blocks: int = 2,
    batch_size: int = 128,
    image: int = 32,
    dropout: float = 0.1,
) -> Parts:
    """Returns DDPM's network with noisy images and their noise; Adam.

    Raises:
        WorkloadError: The image cannot be halved at every level, or another setting is invalid.
    """
    levels = counts(stages, "factors of the width, one per level,", "1-2-2-2", 2)
    if image % 2 ** (len(levels) - 1):
        raise WorkloadError(f"workload.image: expected a multiple of {2 ** (len(levels) - 1)}, got {image}")
    if width % 32:
        raise WorkloadError(f"workload.width: expected a multiple of 32, got {width}")
    model = DiffusionUNet(width, levels, blocks, image, batch_size, dropout)
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, 3, image, image)
    return model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=2e-4), batch


# --------------------------------------------------------------------------------- stacked hourglasses


class Bottleneck(nn.Module):
    """Pre-activated 1x1, 3x3 and 1x1 convolutions with a residual connection on ``[batch, channels, …]``.

    Args:
        channels: Channels of the input.
        width: Channels of the output; the first two convolutions have half as many.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        half = width // 2
        part = partial(preactivated, act=nn.ReLU, bias=True)
        self.layers = nn.Sequential(*part(channels, half, 1), *part(half, half, 3), *part(half, width, 1))
        self.shortcut = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shortcut(x)


class Hourglass(nn.Module):
    """Hourglass of ``levels`` poolings and upsamplings, with a skip branch at each level."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.beside, self.down, self.up = (Bottleneck(width, width) for _ in range(3))
        self.inner = Hourglass(levels - 1, width) if levels > 1 else Bottleneck(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.inner(self.down(F.max_pool2d(x, 2))))
        return self.beside(x) + F.interpolate(y, scale_factor=2)


class Stacked(nn.Module):
    """Stacked hourglasses (Newell, Yang and Deng, "Stacked Hourglass Networks for Human Pose Estimation", ECCV 2016).

    Maps images ``[batch, 3, image, image]`` to heat maps ``[batch, stacks, joints, image / 4, image / 4]``. Section 3:
    a 7x7 convolution of stride 2, residual modules and a max-pool reduce an image of 256 pixels to 64. An hourglass
    pools ``levels`` times, with a residual module in parallel to every pool, upsamples by nearest neighbors and adds
    the parallel branches. After each of the ``stacks``, a heat map per joint is predicted and fed back by 1x1
    convolutions. Residual modules are the pre-activated bottlenecks of He et al. (2016; the paper's Figure 4).

    1. The batch is 16 images; the paper does not give it.
    """

    def __init__(self, stacks: int, levels: int, width: int, joints: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv(3, width // 4, 7, 2, nn.ReLU, bias=True),
            Bottleneck(width // 4, width // 2),
            nn.MaxPool2d(2),
            Bottleneck(width // 2, width // 2),
            Bottleneck(width // 2, width),
        )
        self.hourglasses = nn.ModuleList(
            nn.Sequential(
                Hourglass(levels, width), Bottleneck(width, width), *conv(width, width, 1, act=nn.ReLU, bias=True)
            )
            for _ in range(stacks)
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, joints, 1) for _ in range(stacks))
        self.features = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(stacks - 1))
        self.feedback = nn.ModuleList(nn.Conv2d(joints, width, 1) for _ in range(stacks - 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        maps = []
        for i, (hourglass, head) in enumerate(zip(self.hourglasses, self.heads, strict=True)):
            y = hourglass(x)
            maps.append(head(y))
            if i < len(self.features):
                x = x + self.features[i](y) + self.feedback[i](maps[-1])
        return torch.stack(maps, 1)


def squared_error(maps: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean squared error of every stack's heat maps against targets ``[batch, joints, …]``."""
    return F.mse_loss(maps, targets[:, None].expand_as(maps))


def hourglass(
    *, stacks: int = 8, levels: int = 4, width: int = 256, joints: int = 16, batch_size: int = 16, image: int = 256
) -> Parts:
    """Returns stacked hourglasses with a heat map per joint; mean squared error (section 3.2), RMSprop at 2.5e-4 (3.3).

    Raises:
        WorkloadError: The pools do not divide the side of the image, or the channels are no multiple of 4.
    """
    if image % (4 << levels):
        raise WorkloadError(f"workload.image: expected a multiple of {4 << levels} with {levels} levels, got {image}")
    if width % 4:
        raise WorkloadError(f"workload.width: expected a multiple of 4, got {width}")
    model = Stacked(stacks, levels, width, joints)
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, joints, image // 4, image // 4)
    return model, squared_error, torch.optim.RMSprop(model.parameters(), lr=2.5e-4), batch


# --------------------------------------------------------------------------------------------- YOLOv3


def leaky(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with batch-norm and leaky ReLU."""
    return nn.Sequential(*conv(channels, width, kernel, stride, lambda: nn.LeakyReLU(0.1)))


class DarkBlock(nn.Sequential):
    """Residual block of a 1x1 convolution to half the channels and a 3x3 convolution back."""

    def __init__(self, channels: int) -> None:
        super().__init__(leaky(channels, channels // 2, 1), leaky(channels // 2, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class YOLO(nn.Module):
    """YOLOv3 (Redmon and Farhadi, "YOLOv3: An Incremental Improvement", 2018): Darknet-53, detections on three scales.

    Maps images ``[batch, 3, image, image]`` to ``[batch, outputs, side, side]`` for side image / 32, / 16 and / 8.
    Table 1: 3x3 convolutions, five of them of stride 2, and 1, 2, 8, 8 and 4 residual blocks of a 1x1 and a 3x3
    convolution, each with batch-norm and leaky ReLU. Section 2.3: detections from the last block; then, twice, a 1x1
    convolution, upsampling and concatenation with the last block of twice the side, from which the next detections are
    made; three boxes of 4 + 1 + 80 numbers at each place. 61,949,149 parameters for 80 classes.

    1. Loss: binary cross-entropy of every number against a dense target; the paper's squared errors of matching boxes
       depend on the data.
    2. The batch is 8 images, as the paper's implementation has in memory at a time (64 in 8 parts); SGD with momentum
       0.9.
    """

    scales = 3
    boxes = 3  # at each place

    def __init__(self, stages: tuple[int, ...], width: int, outputs: int) -> None:
        super().__init__()
        widths = [width << i for i in range(len(stages) + 1)]
        self.stem = leaky(3, width, 3)
        self.stages = nn.ModuleList(
            nn.Sequential(leaky(w // 2, w, 3, 2), *(DarkBlock(w) for _ in range(count)))
            for count, w in zip(stages, widths[1:], strict=True)
        )
        self.necks = nn.ModuleList()
        self.heads = nn.ModuleList()
        self.routes = nn.ModuleList()
        channels = widths[-1]
        for w in widths[: -self.scales - 1 : -1]:
            half = w // 2
            neck = [
                leaky(channels, half, 1),
                leaky(half, w, 3),
                leaky(w, half, 1),
                leaky(half, w, 3),
                leaky(w, half, 1),
            ]
            self.necks.append(nn.Sequential(*neck))
            self.heads.append(nn.Sequential(leaky(half, w, 3), nn.Conv2d(w, outputs, 1)))
            if len(self.heads) < self.scales:
                self.routes.append(leaky(half, half // 2, 1))
                channels = half // 2 + half  # concatenated with a stage of half the channels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        detections = []
        for i, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            x = neck(x)
            detections.append(head(x))
            if i < len(self.routes):
                x = torch.cat([F.interpolate(self.routes[i](x), scale_factor=2), features[-2 - i]], 1)
        return tuple(detections)


def entropies(detections: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Returns the summed binary cross-entropies of all scales; ``targets`` is one flat tensor for all of them."""
    parts = targets.split([x.numel() for x in detections])
    return torch.stack(
        [F.binary_cross_entropy_with_logits(x, t.view_as(x)) for x, t in zip(detections, parts, strict=True)]
    ).sum()


def yolov3(
    *, stages: str = "1-2-8-8-4", width: int = 32, classes: int = 80, batch_size: int = 8, image: int = 416
) -> Parts:
    """Returns YOLOv3 with a dense target for every number of every box.

    Args:
        stages: Residual blocks of the five stages.
        width: Channels of the first convolution.
        classes: Number of classes.
        batch_size: Images per batch.
        image: Side of the images in pixels.

    Raises:
        WorkloadError: ``stages`` does not have five numbers, or the side of the image is no multiple of 32.
    """
    blocks = counts(stages, "five numbers of blocks", "1-2-8-8-4", 5, 5)
    if image % 32 or image < 32:
        raise WorkloadError(f"workload.image: expected a multiple of 32, got {image}")
    outputs = YOLO.boxes * (5 + classes)
    model = YOLO(blocks, width, outputs)
    places = sum((image // (8 << i)) ** 2 for i in range(YOLO.scales))
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size * outputs * places)
    return model, entropies, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), batch
