import random

import numpy as np
import pytest
import torch

from l0prune.running import rng

CPU = torch.device("cpu")


def draw(own=()):
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        torch.rand(2).tolist(),
        [torch.rand(1, generator=generator).item() for generator in own],
    )


def draw_and_fail():
    draw()
    raise ZeroDivisionError


def test_what_is_restored_draws_the_same_again():
    own = [torch.Generator().manual_seed(3)]
    draw(own)  # the normal draws of Python and NumPy keep a second value: it counts too
    state = rng.capture(CPU, own)
    first = draw(own)
    draw(own)
    rng.restore(state, CPU, own)
    assert draw(own) == first


def test_a_state_survives_a_file_that_holds_plain_data_only(tmp_path):
    state = rng.capture(CPU)
    first = draw()
    torch.save(state, tmp_path / "state")
    rng.restore(torch.load(tmp_path / "state", weights_only=True), CPU)
    assert draw() == first


def test_a_seed_decides_all():
    rng.seed_all(5)
    first = draw()
    rng.seed_all(5)
    assert draw() == first


def test_nothing_is_disturbed_even_by_an_error():
    state = rng.capture(CPU)
    first = draw()
    rng.restore(state, CPU)
    with pytest.raises(ZeroDivisionError), rng.preserved(CPU):
        draw_and_fail()
    assert draw() == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_devices_generator_belongs_to_it():
    device = torch.device("cuda")
    state = rng.capture(device)
    first = torch.rand(3, device=device)
    rng.restore(state, device)
    assert torch.equal(torch.rand(3, device=device), first)
