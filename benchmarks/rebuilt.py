"""What users' threads are about where no package holds it: rebuilt small, in plain PyTorch.

Tokens are ``(batch, tokens, dim)``, images ``(batch, channels, height, width)``; where a forward
says nothing else, it returns the shape that it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedQkv(nn.Module):
    """Attention as the repository of DINO writes it: one Linear, its three parts by their index."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


class EinopsQkv(nn.Module):
    """Attention as flash-attn's MHA splits it: ``(three h d)`` with ``d`` given, in einops."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        qkv = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, d=self.head_dim)
        q, k, v = qkv.unbind(0)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Vit(nn.Module):
    """A vision transformer around such an attention."""

    def __init__(self, attention: type[nn.Module], dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, 8)
        self.place = nn.Parameter(torch.randn(1, 65, dim) * 0.02)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.blocks = nn.ModuleList(VitBlock(attention, dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, 3, 64, 64)``; scores of 100 classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class VitBlock(nn.Module):
    """Attention and an MLP, with norms before them."""

    def __init__(self, attention: type[nn.Module], dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ChannelAttention(nn.Module):
    """Restormer's attention between channels: 1×1, depthwise 3×3, chunk, heads by a reshape."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.depthwise = nn.Conv2d(3 * dim, 3 * dim, 3, padding=1, groups=3 * dim)
        self.out = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        height, width = x.shape[-2:]
        parts = self.depthwise(self.qkv(x)).chunk(3, dim=1)
        q, k, v = (rearrange(t, "b (h c) y x -> b h c (y x)", h=self.heads) for t in parts)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(-1)
        return self.out(rearrange(weights @ v, "b h c (y x) -> b (h c) y x", y=height, x=width))


class GatedConvs(nn.Module):
    """Restormer's feed-forward: 1×1, depthwise 3×3, chunk, one half gates the other."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(dim, 2 * hidden, 1)
        self.depthwise = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.out = nn.Conv2d(hidden, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.depthwise(self.into(x)).chunk(2, dim=1)
        return self.out(F.gelu(first) * second)


class ChannelNorm(nn.Module):
    """A LayerNorm over the channels of an image."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RestormerBlock(nn.Module):
    """Both, with norms before them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = ChannelNorm(dim), ChannelAttention(dim, heads)
        self.norm2, self.ffn = ChannelNorm(dim), GatedConvs(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Restormer(nn.Module):
    """Two levels of it, joined by pixel shuffling and a skip, around a residual."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 3, padding=1, bias=False)
        self.first = RestormerBlock(dim, 2)
        self.down = nn.Sequential(nn.Conv2d(dim, dim // 2, 3, padding=1), nn.PixelUnshuffle(2))
        self.deep = RestormerBlock(2 * dim, 4)
        self.up = nn.Sequential(nn.Conv2d(2 * dim, 4 * dim, 3, padding=1), nn.PixelShuffle(2))
        self.reduce = nn.Conv2d(2 * dim, dim, 1)
        self.last = RestormerBlock(dim, 2)
        self.out = nn.Conv2d(dim, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(self.embed(x))
        up = self.up(self.deep(self.down(first)))
        return x + self.out(self.last(self.reduce(torch.cat([up, first], 1))))


class Generator(nn.Module):
    """The decoder of thread 125: a Linear, a view into maps, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 4096)
        self.up1 = nn.ConvTranspose2d(256, 128, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(128, 64, 4, 2, 1)
        self.up3 = nn.ConvTranspose2d(64, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, 512)``; images of 32 by 32."""
        x = F.relu(self.linear(x)).view(-1, self.up1.in_channels, 4, 4)
        return self.up3(F.relu(self.up2(F.relu(self.up1(x)))))


class OneOutput(nn.Module):
    """The network of thread 179: its last convolution has one output, and groups=1 equals that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 64, 2, 2), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 1, 3, 1, 1), nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, 3, height, width)``; one map of half the size."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)))


class Salience(nn.Module):
    """Thread 126, deeper: a map of one channel that weights all others, and one at the end."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.map = nn.Conv2d(width, 1, 3, 1, 1)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU())
        self.end = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, 3, height, width)``; one map of half the size."""
        x = F.relu(self.stem(x))
        return self.end(self.body(x * self.map(x).sigmoid()))
