"""Two small VAEs with binary latents: hard concrete, and Bernoulli with straight-through gradients.

Both learn the handwritten digits that come with scikit-learn, black on white, from the same start.
A hard concrete latent is 0 or 1 most of the time and has a gradient in between; a Bernoulli one is
always 0 or 1, and its gradient is a guess. Run it: python examples/hard_concrete_vae.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits

import l0prune

HardConcrete = l0prune.distributions.HardConcrete

PIXELS, HIDDEN, LATENTS = 64, 128, 24
EPOCHS, BATCH, RATE = 80, 50, 5e-3
BETA = 0.2  # at 2/3, the default of gates, few latents are 0 or 1: 1.2 nats an image more


class Figures(NamedTuple):
    """What a VAE reaches on the test images, in nats an image.

    Attributes:
        bound: −ELBO, which is at least −log p(x).
        divergence: the part of it that the latents cost.
        binary: what the image costs given a latent code of zeros and ones.
    """

    bound: float
    divergence: float
    binary: float


class HardConcreteVAE(nn.Module):
    """Encoder and decoder of one hidden layer each, with hard concrete latents."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, LATENTS)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS)
        )

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A sample, and the divergence of each latent from a fair prior."""
        q = HardConcrete(self.encoder(x), BETA)
        return q.rsample(), kl_divergence(q, HardConcrete(0.0, BETA))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of each image given its latents, and nats of the latents."""
        z, divergence = self.latents(x)
        return self.cost(x, z), divergence.sum(-1)

    def cost(self, x: Tensor, z: Tensor) -> Tensor:
        """−log p(x|z)."""
        return binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(-1)


class BernoulliVAE(HardConcreteVAE):
    """The same with Bernoulli latents, whose sample has the gradient of its probability."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A sample, and the divergence of each latent from a fair coin."""
        q = Bernoulli(logits=self.encoder(x))
        z = q.sample() + q.probs - q.probs.detach()
        return z, kl_divergence(q, Bernoulli(0.5))


def images() -> tuple[Tensor, Tensor]:
    """Images to train on and to test with; flat, 0 or 1."""
    data = l0prune.load_data("digits")
    train, test = ((part.inputs.flatten(1) > 0).float() for part in (data.train, data.test))
    return train, test


def train(vae: HardConcreteVAE, x: Tensor) -> None:
    """Minimise −ELBO, in which the divergence counts fully from half of the epochs on."""
    optimizer = torch.optim.Adam(vae.parameters(), lr=RATE)
    for epoch in range(EPOCHS):
        warmth = min(1.0, 2 * epoch / EPOCHS)
        for batch in x[torch.randperm(len(x))].split(BATCH):
            cost, divergence = vae(batch)
            optimizer.zero_grad()
            (cost + warmth * divergence).mean().backward()
            optimizer.step()


@torch.no_grad()
def figures_of(vae: HardConcreteVAE, x: Tensor, samples: int) -> Figures:
    """The figures, means over samples of the latents."""
    found = []
    for _ in range(samples):
        z, divergence = vae.latents(x)
        spent = divergence.sum(-1).mean()
        found.append((vae.cost(x, z).mean() + spent, spent, vae.cost(x, z.round()).mean()))
    return Figures(*torch.tensor(found).mean(0).tolist())


def main() -> dict[str, Figures]:
    """Both, from the same weights."""
    x, test = images()
    found = {}
    for kind in (HardConcreteVAE, BernoulliVAE):
        torch.manual_seed(0)
        vae = kind()
        train(vae, x)
        found[kind.__name__] = figures = figures_of(vae, test, samples=50)
        print(f"{kind.__name__:16} {figures.bound:6.2f} nats an image, of them "
              f"{figures.divergence:5.2f} for the latents; {figures.binary:6.2f} for the image "
              "given latents of 0 and 1")  # fmt: skip
    return found


if __name__ == "__main__":
    main()
