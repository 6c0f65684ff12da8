"""Plans of small networks as text, for comparison between processes."""

import torch
from networks import CASES

import l0prune


def plans(names):
    """A line for each of ``networks.CASES``."""
    surveys = (
        l0prune.survey(CASES[name][0], (torch.randn(CASES[name][1]),), own_class=False)
        for name in names
    )
    return "".join(f"{survey.plan.to_json()}\n" for survey in surveys)


def write(path, names):
    """What a string hashes to here, and the plans."""
    path.write_text(f"{hash('axis')}\n{plans(names)}")
