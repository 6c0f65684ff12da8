"""A trained network of graphs: CHGNet's energies of crystals that are made by rule.

CHGNet takes lists of graphs, each an object of its own. Here the arrangement of atoms is one and
the same, rock salt's, so that the kinds of the atoms and the lattice are what is left: tensors with
a row for each crystal.
"""

from __future__ import annotations

import itertools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real_networks import Real, near
from benchmarks.wheels import wheel

PLACES = torch.tensor(
    [[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
) / 2  # fmt: skip
# One kind's atoms are moved by 0.1 Å along each axis, as in a ferroelectric crystal: at straight
# angles an arc cosine has no derivative, and float32 errors of rounding grow without bound.
MOVED = PLACES + torch.tensor([0.0] * 4 + [0.1 / 5.6] * 4)[:, None]
FAR, NEAR = 6.0, 3.0  # Å: bonds of atoms, and those that form angles
METALS = (3, 11, 12, 19, 20, 22, 25, 26, 28, 29, 37, 38, 47, 56, 57)
OTHERS = (7, 8, 9, 15, 16, 17, 34, 35, 53)


def chgnet_package() -> Any:
    """The module of CHGNet's network, with empty ones for what only other parts of it need."""
    folder = wheel("chgnet", "0.4.2") / "chgnet"

    def holding(name: str, **values: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)

    holding("chgnet", __path__=[str(folder)], PredTask=str)
    holding("chgnet.model", __path__=[str(folder / "model")])
    holding("chgnet.utils", determine_device=None)
    holding("chgnet.graph", __path__=[str(folder / "graph")], CrystalGraph=None,
            CrystalGraphConverter=lambda **_: None)  # fmt: skip
    holding("pymatgen")
    holding("pymatgen.core", Structure=None)
    package = import_module("chgnet.model.model")
    layers = vars(sys.modules["chgnet.model.layers"])
    layers |= {"aggregate": added, "len": lambda rows: rows.shape[0]}  # len() is a fixed number
    return package


def added(data: Tensor, owners: Tensor, *, average: bool, num_owner: int) -> Tensor:
    """Sums of the rows of each owner.

    The package counts the owners besides, by an operator whose sizes depend on numbers: no ONNX
    file can have that.
    """
    assert not average
    return data.new_zeros(num_owner, data.shape[1]).index_add(0, owners, data)


class Crystals(nn.Module):
    """Energies of crystals of one arrangement of atoms, without the part of the composition."""

    def __init__(self, network: nn.Module, size: float) -> None:
        super().__init__()
        self.network = network
        for name, values in bonds(size).items():
            self.register_buffer(name, values)

    def forward(self, kinds: Tensor, lattice: Tensor) -> Tensor:
        """Atoms' numbers (crystals, 8) and lattices (crystals, 3, 3) → eV an atom (crystals,)."""
        net, row = self.network, torch.arange(kinds.shape[0], device=kinds.device)[:, None]
        every, pairs, atoms = len(self.pair), len(self.first), kinds.shape[1]
        places = MOVED.to(lattice) @ lattice
        ends = places[:, self.ends] + torch.stack(
            [torch.zeros_like(self.image @ lattice), self.image @ lattice], 2
        )
        center, other = ends.flatten(0, 1).unbind(1)
        far, close, vectors = net.bond_basis_expansion(
            center=center, neighbor=other, undirected2directed=(self.first + every * row).flatten(),
            image=torch.zeros_like(other), lattice=torch.zeros_like(lattice[0]),
        )  # fmt: skip
        atom, one, one_directed, two, two_directed = self.angle.unbind(1)
        sides = ((each + every * row).flatten() for each in (one_directed, two_directed))
        angles = net.angle_embedding(net.angle_basis_expansion(*(vectors[each] for each in sides)))
        atom_graph = (self.ends + atoms * row[..., None]).flatten(0, 1)
        bond_graph = [atom + atoms * row, one + pairs * row, two + pairs * row]
        bond_graph = torch.stack(bond_graph, 2).flatten(0, 1)
        found, bond = net.atom_embedding(kinds.flatten() - 1), net.bond_embedding(far)
        of_atoms = {"bond_weights": net.bond_weights_ag(far), "atom_graph": atom_graph,
                    "directed2undirected": (self.pair + pairs * row).flatten()}  # fmt: skip
        weights = net.bond_weights_bg(close)
        layers = zip(net.atom_conv_layers[:-1], net.bond_conv_layers, net.angle_layers, strict=True)
        for by_atoms, by_bonds, by_angles in layers:
            found = by_atoms(atom_feas=found, bond_feas=bond, **of_atoms)
            bond = by_bonds(found, bond, weights, angles, bond_graph)
            angles = by_angles(found, bond, angles, bond_graph)
        found = net.atom_conv_layers[-1](atom_feas=found, bond_feas=bond, **of_atoms)
        return net.mlp(net.readout_norm(found)).view(-1, atoms).mean(1)


def bonds(size: float) -> dict[str, Tensor]:
    """Bonds and angles of rock salt with a cubic cell of so many Å, in CHGNet's numbering."""
    images = torch.tensor(list(itertools.product(range(-2, 3), repeat=3)))
    offsets = PLACES[None, :, None] + images[None, None] - PLACES[:, None, None]
    length = size * offsets.norm(dim=-1)
    centers, others, at = ((length > 1e-3) & (length < FAR)).nonzero(as_tuple=True)
    known: dict[tuple[int, ...], int] = {}
    pair, first = list[int](), list[int]()
    for number, (a, b, image) in enumerate(zip(centers, others, images[at], strict=True)):
        known[int(a), int(b), *image.tolist()] = number
        back = known.get((int(b), int(a), *(-image).tolist()))
        pair.append(len(first) if back is None else pair[back])
        if back is None:
            first.append(number)
    close = (length[centers, others, at] < NEAR).nonzero().flatten().tolist()
    angle = [
        [int(centers[i]), pair[i], i, pair[j], j]
        for i, j in itertools.permutations(close, 2)
        if centers[i] == centers[j]
    ]
    return {"ends": torch.stack([centers, others], 1), "image": images[at].float(),
            "pair": torch.tensor(pair), "first": torch.tensor(first),
            "angle": torch.tensor(angle)}  # fmt: skip


def chgnet() -> Real:
    """The energies of crystals with rock salt's arrangement of atoms."""
    package = chgnet_package()
    (file,) = (wheel("chgnet", "0.4.2") / "chgnet" / "pretrained" / "0.3.0").glob("*.tar")
    network = package.CHGNet.from_dict(torch.load(file, "cpu", weights_only=True)["model"])
    model, drawn = Crystals(network, 5.6).eval(), torch.Generator().manual_seed(0)
    kinds = torch.cat([
        torch.tensor(of)[torch.randint(len(of), (400, 2), generator=drawn)].repeat_interleave(2, 1)
        for of in (METALS, OTHERS)
    ], 1)  # fmt: skip
    sizes = 5.4 + 0.3 * torch.rand(400, generator=drawn)  # between which bonds are the same
    given = {"kinds": kinds, "lattice": sizes[:, None, None] * torch.eye(3)}
    held = [
        {name: each[at : at + 25] for name, each in given.items()} for at in range(300, 400, 25)
    ]
    return Real(model, {name: each[:300] for name, each in given.items()}, held,
                "energies' variance that is no error", near(model, held))  # fmt: skip
