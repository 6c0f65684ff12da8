"""A mixture of experts, written in the ways in which its experts can be stored."""

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """Each input gets its best two experts, by its share of each; channels are last.

    Args:
        way: "list" of modules, all of which run; or one tensor for all experts, of which those
            chosen are read, by "einsum" or "bmm".
    """

    def __init__(self, size: int, hidden: int, experts: int, way: str) -> None:
        super().__init__()
        self.route, self.way = nn.Linear(size, experts), way
        if way == "list":
            layers = (nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))
                      for _ in range(experts))  # fmt: skip
            self.experts = nn.ModuleList(layers)
        else:
            self.up = nn.Parameter(torch.randn(experts, size, hidden))
            self.down = nn.Parameter(torch.randn(experts, hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        share, index = self.route(rows).softmax(-1).topk(2)
        if self.way == "list":
            shares = torch.zeros(len(rows), len(self.experts)).to(x).scatter(1, index, share)
            made = sum(e(rows) * shares[:, n, None] for n, e in enumerate(self.experts))
        elif self.way == "einsum":
            hidden = torch.einsum("ni,nkih->nkh", rows, self.up[index]).relu()
            made = torch.einsum("nkh,nkho->nko", hidden, self.down[index]).mul(share[..., None])
            made = made.sum(1)
        else:
            index = index.flatten()
            hidden = torch.bmm(rows.repeat_interleave(2, 0)[:, None], self.up[index]).relu()
            made = torch.bmm(hidden, self.down[index]).unflatten(0, (-1, 2))
            made = (made[:, :, 0] * share[..., None]).sum(1)
        return made.unflatten(0, x.shape[:-1])
