"""Networks that the recipes train: the paper's, and small ones for small data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    """The paper's 784-300-100 network for MNIST (its Table 1), initialised like its code."""
    return _initialised(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )
    )


def lenet5() -> nn.Module:
    """LeNet-5-Caffe, 20-50-800-500, for MNIST, initialised like the paper's code."""
    return _initialised(
        nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )
    )


def digits_lenet() -> nn.Module:
    """A small LeNet for 8×8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def resnet20() -> nn.Module:
    """ResNet-20 for CIFAR-10 with parameter-free (option A) shortcuts."""
    return CifarResNet(3)


def resnet56() -> nn.Module:
    """ResNet-56 for CIFAR-10 with parameter-free (option A) shortcuts."""
    return CifarResNet(9)


def wrn28_10() -> nn.Module:
    """Wide ResNet 28-10 for CIFAR-10, the largest network of the L0 paper (its section 4.2)."""
    return _initialised(WideResNet(28, 10))


def _initialised(model: nn.Module) -> nn.Module:
    """Kaiming-normal weights by the number of inputs, and zero biases, as in the paper's code."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """He et al. 2016 for CIFAR-10: 6n + 2 layers, widths 16, 32, 64."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._layer(16, 16, blocks, 1)
        self.layer2 = self._layer(16, 32, blocks, 2)
        self.layer3 = self._layer(32, 64, blocks, 2)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def _layer(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, 3, 32, 32) to (n, 10)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def digits_resnet() -> nn.Module:
    """A small residual network for 8×8 digits: six blocks of 16 and 32 channels."""
    return DigitsResNet((16, 32), 3)


def digits_wide() -> nn.Module:
    """A wide residual network for 8×8 digits: four blocks of 64 and 128 channels."""
    return DigitsResNet((64, 128), 2)


class DigitsResNet(nn.Module):
    """A stem, blocks of one width at 8×8, as many of another at 4×4, and a Linear."""

    def __init__(self, widths: tuple[int, int], blocks: int) -> None:
        super().__init__()
        first, last = widths
        self.stem = nn.Sequential(nn.Conv2d(1, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first))
        self.layer1 = nn.Sequential(*(BasicBlock(first, first, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(
            BasicBlock(first, last, 2), *(BasicBlock(last, last, 1) for _ in range(blocks - 1))
        )
        self.linear = nn.Linear(last, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, 1, 8, 8) to (n, 10)."""
        x = self.layer2(self.layer1(F.relu(self.stem(x))))
        return self.linear(x.mean((2, 3)))


class WideBlock(nn.Module):
    """BatchNorm, ReLU and a 3×3 convolution, twice; dropout or gates belong before the second."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, 1, bias=False)
        changes = inputs != outputs or stride != 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return shortcut + self.conv2(F.relu(self.bn2(self.conv1(y))))


class WideResNet(nn.Module):
    """Zagoruyko & Komodakis 2016 for CIFAR-10; strides as in the code of the L0 paper."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.layer1 = self._layer(16, 16 * width, blocks, 1)
        self.layer2 = self._layer(16 * width, 32 * width, blocks, 2)
        self.layer3 = self._layer(32 * width, 64 * width, blocks, 2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.linear = nn.Linear(64 * width, 10)

    @staticmethod
    def _layer(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = WideBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, 3, 32, 32) to (n, 10)."""
        x = F.relu(self.bn(self.layer3(self.layer2(self.layer1(self.conv1(x))))))
        return self.linear(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
