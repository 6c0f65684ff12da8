import pytest
import torch
from torch import nn

from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import answers_of
from l0prune.exporting.certify.certificate import Certificate, compare, compare_onnx
from l0prune.exporting.certify.difference import difference

INPUTS = (((torch.linspace(-1, 1, 12).reshape(2, 6),), {}),)


class Plus(nn.Module):
    """The identity, with an offset added and taken off: exact in float64, not in float32."""

    def __init__(self, offset: float, error: float = 0.0):
        super().__init__()
        self.register_buffer("offset", torch.tensor(offset))
        self.error = error

    def forward(self, x):
        return (x + self.offset) - self.offset + self.error


def certified(gated, dense):
    return Certificate(tuple(compare(answers_of(gated, INPUTS), dense)))


def float32(certificate):
    (check,) = [c for c in certificate.checks if c.dtype == "float32"]
    return check


def test_equal_models_pass_at_the_usual_tolerance():
    check = float32(certified(Plus(0.0), Plus(0.0)))
    assert (check.error, check.tolerance) == (0.0, 1e-5)


def test_a_model_that_rounds_is_allowed_its_rounding_and_the_others():
    rounding = Plus(512.0)
    with torch.no_grad():
        x = INPUTS[0][0][0]
        own = float((rounding(x).double() - x.double()).abs().max())  # the scale is 1
    assert own > 1e-5
    check = float32(certified(rounding, Plus(0.0)))
    assert check.error == pytest.approx(own, rel=1e-2)
    assert check.tolerance == pytest.approx(2 * own, rel=1e-2)
    (again,) = compare_onnx(answers_of(rounding, INPUTS), lambda leaves: leaves)
    assert (again.error, again.tolerance) == (check.error, check.tolerance)


def test_its_own_rounding_excuses_no_error_in_float64():
    with pytest.raises(CertificateError, match="dense in float64"):
        certified(Plus(512.0), Plus(0.0, error=1e-8))


def test_there_is_a_largest_rounding():
    with pytest.raises(CertificateError, match=r"allowed 1\.0e-04"):
        certified(Plus(2.0**14), Plus(0.0))


def test_nan_fails():
    with pytest.raises(CertificateError, match="nan"):
        certified(Plus(0.0), Plus(0.0, error=float("nan")))


def test_equal_infinities_are_no_difference():
    a = torch.tensor([1.0, float("-inf"), 2.0])
    assert difference(a, a.clone()) == 0
    assert difference(a, torch.tensor([1.0, 0.0, 2.0])) == float("inf")
