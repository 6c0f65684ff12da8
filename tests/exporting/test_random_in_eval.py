"""Models that draw random numbers in eval mode: cut where that leaves the draw as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from torch import nn

import l0prune
from l0prune.errors import CertificateError


def layers():
    torch.manual_seed(0)
    return {"a": nn.Linear(4, 8), "b": nn.Linear(8, 6), "c": nn.Linear(6, 3)}


def noise_for_each_example(m, x):
    return m.c(F.relu(m.b(F.relu(m.a(x)) * torch.rand_like(x[:, :1]))))


def noise_as_wide_as_an_axis(m, x):
    return m.c(F.relu(m.b(F.relu(m.a(x)) + torch.randn(x.shape[0], 8))))


def noise_like_an_axis(m, x):
    h = F.relu(m.a(x))
    return m.c(F.relu(m.b(h + torch.randn_like(h))))


def dropout_kept_on(m, x):
    return m.c(F.relu(m.b(F.dropout(F.relu(m.a(x)), 0.5, training=True))))


def sampled(m, x):
    """As a variational autoencoder does, after a gated layer."""
    h = m.b(F.relu(m.a(x)))
    return m.c(h + torch.exp(0.1 * h) * torch.randn_like(h))


def gumbel(m, x):
    return m.c(F.gumbel_softmax(m.b(F.relu(m.a(x)))))


def dropout_in_attention(m, x):
    h = F.relu(m.a(x))
    y = F.scaled_dot_product_attention(*[h[:, None]] * 3, dropout_p=0.3)[:, 0]
    return m.c(F.relu(m.b(y)))


# the sizes of the axes that can be cut in each, beside the inputs
NETWORKS = {
    noise_for_each_example: [8, 6],
    noise_as_wide_as_an_axis: [6],
    noise_like_an_axis: [6],
    dropout_kept_on: [6],
    sampled: [8],
    gumbel: [8],
    dropout_in_attention: [6],
}


def gated(forward):
    model = l0prune.gate(Fn(forward, **layers()).eval(), torch.randn(2, 4))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model


def seeded(model, x):
    torch.manual_seed(3)
    return model(x)


@pytest.mark.parametrize("forward", NETWORKS)
@pytest.mark.one_in(12)
def test_what_random_numbers_are_drawn_for_stays_and_the_rest_is_cut(forward):
    found = l0prune.survey(Fn(forward, **layers()).eval(), torch.randn(2, 4))
    assert [axis.size for axis in found.axes if axis.kind != "input"] == NETWORKS[forward]
    if len(NETWORKS[forward]) == 1:
        drawn = ("random numbers", "made inside forward")
        assert any(word in pin.reason for pin in found.pins for word in drawn)
    model = gated(forward)
    small = l0prune.export(model)
    assert small.params < small.params_before
    for rows in (1, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(seeded(small.module, x), seeded(model, x))
        assert not torch.equal(small.module(x), small.module(x))


def test_survey_and_note_say_what_is_random():
    found = l0prune.survey(Fn(noise_like_an_axis, **layers()).eval(), torch.randn(2, 4))
    assert [text.partition(" at ")[0] for text in found.draws] == ["aten.randn_like"]
    assert ".py:" in found.draws[0]
    assert found.to_dict()["draws"] == list(found.draws)
    assert "draws random numbers (aten.randn_like at" in str(found)
    assert (
        "draws random numbers (aten.rand_like at"
        in l0prune.export(gated(noise_for_each_example)).note
    )


def test_a_file_whose_numbers_cannot_be_compared_is_not_written(tmp_path):
    small = l0prune.export(gated(noise_for_each_example))
    with pytest.raises(CertificateError, match="draws random numbers"):
        small.save_onnx(tmp_path / "model.onnx")
    small.save(tmp_path / "model.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


def test_dropout_that_is_off_draws_nothing():
    model = Fn(lambda m, x: m.c(F.relu(m.b(F.dropout(F.relu(m.a(x)), 0.5, False)))), **layers())
    found = l0prune.survey(model.eval(), torch.randn(2, 4))
    assert [axis.size for axis in found.axes if axis.kind != "input"] == [8, 6]
    assert found.draws == ()
    assert "draws" not in str(found)


def test_randomness_that_torch_does_not_know_of_is_refused():
    source = np.random.default_rng(0)

    def forward(m, x):
        return m.c(F.relu(m.b(F.relu(m.a(x)) * float(source.random()))))

    with pytest.raises(CertificateError, match="nothing was written"):
        l0prune.export(gated(forward))
