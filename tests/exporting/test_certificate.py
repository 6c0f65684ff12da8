import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from l0prune.capture.last_place import RUNS
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import answers_of
from l0prune.exporting.certify.certificate import (
    Certificate,
    Check,
    compare,
    compare_file,
    compare_in_parts,
)
from l0prune.exporting.certify.difference import common_scales, difference
from l0prune.exporting.certify.lending import move_values

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
    (again,) = compare_file("onnx", answers_of(rounding, INPUTS), lambda leaves: leaves)
    assert (again.error, again.tolerance) == (check.error, check.tolerance)


def test_where_nothing_is_handed_out_float64_is_enough():
    answers = answers_of(Plus(512.0), INPUTS, dtypes=[torch.float64])
    (check,) = compare(answers, Plus(0.0))
    assert (check.dtype, check.passed) == ("float64", True)
    (check,) = compare(answers, Plus(0.0, error=1e-8))
    assert not check.passed


def test_its_own_rounding_excuses_no_error_in_float64():
    with pytest.raises(CertificateError, match="graph in float64"):
        certified(Plus(512.0), Plus(0.0, error=1e-8))


def test_there_is_a_largest_rounding():
    with pytest.raises(CertificateError, match=r"allowed 1\.0e-03") as raised:
        certified(Plus(2.0**17), Plus(0.0))
    assert "In float32 the model rounds by about as much" in str(raised.value)
    with pytest.raises(CertificateError, match="please report") as raised:
        certified(Plus(2.0**17), Plus(0.0, error=1e-3))  # wrong in float64, too
    assert "rounds" not in str(raised.value)


def test_rounding_beyond_the_largest_is_measured_for_the_message():
    """In one run it may round by little, by luck: here the first of two comparisons says so."""
    answers = [
        replace(answer, single=answer.exact, measured=lambda: [[1.2e-4]])
        for answer in answers_of(Plus(0.0), INPUTS)
    ]

    def failed(error):
        checks = [Check("graph", "float64", 2, 0.0, 1e-10)]
        given = compare_file("onnx", answers, lambda leaves: [leaves[0] + error])
        with pytest.raises(CertificateError, match=r"allowed 1\.2e-04") as raised:
            Certificate((*checks, *given))
        return str(raised.value)

    assert "In float32 the model rounds by about as much" in failed(2e-4)
    assert "please report" not in failed(2e-4)
    assert "please report" in failed(3e-4)
    given = compare_file("onnx", answers, lambda leaves: [leaves[0] + 1.1e-4])
    assert Certificate((Check("graph", "float64", 2, 0.0, 1e-10), *given))  # no more than its own


def test_nan_fails():
    with pytest.raises(CertificateError, match="nan"):
        certified(Plus(0.0), Plus(0.0, error=float("nan")))


def test_equal_infinities_are_no_difference():
    a = torch.tensor([1.0, float("-inf"), 2.0])
    assert difference(a, a.clone()) == 0
    assert difference(a, torch.tensor([1.0, 0.0, 2.0])) == float("inf")


def test_the_scale_is_that_of_all_inputs_that_are_compared_together():
    (x,), _ = INPUTS[0]
    tiny = ((x * 1e-3,), {})
    answers = answers_of(nn.Identity(), (*INPUTS, tiny))
    assert [answer.scales for answer in answers] == [(1.0,), (1.0,)]
    errors = [check.error for check in compare(answers, Plus(0.0, error=1e-12))]
    assert errors[:2] == pytest.approx([1e-12, 1e-12], rel=1e-3)
    (exact, _) = compare(answers_of(nn.Identity(), [tiny]), Plus(0.0, error=1e-14))
    assert exact.error == pytest.approx(1e-11, rel=1e-3)  # alone it has its own


def test_outputs_of_other_counts_keep_scales_of_their_own():
    assert common_scales([torch.ones(2), [torch.ones(2), torch.ones(3)]]) == ()
    assert common_scales([[torch.ones(2), -torch.ones(0)], [torch.tensor([-3.0]), 4]]) == ()
    assert common_scales([torch.tensor([1.0, float("inf")]), torch.tensor([[-3.0]])]) == (3.0,)


def test_what_is_wrong_at_some_sizes_alone_names_the_code_that_goes_by_them():
    right = Check("onnx", "float32", 2, 0.0, 1e-5, inputs=((2, 1, 32),))
    wrong = replace(right, error=0.5, inputs=((2, 1, 64), ()))
    with pytest.raises(CertificateError) as caught:
        Certificate((right, wrong))
    said = str(caught.value)
    assert "inputs of 2 × 1 × 64: 5.00e-01" in said
    assert "With inputs of 2 × 1 × 32 they agree" in said
    for others in ((wrong,), (right, replace(wrong, error=1.4e-5))):  # at all; by rounding
        with pytest.raises(CertificateError, match="random in ways of its own"):
            Certificate(others)


def test_a_mask_that_each_example_has_is_no_scale_of_the_others():
    scores = torch.tensor([[0.5, -1e9, 2.0], [1.5, -1e9, -3.0]])
    assert common_scales([scores]) == (3.0,)
    assert common_scales([scores[:1], scores[1:]]) == (3.0,)
    assert difference(scores, scores + torch.tensor([0, 0, 0.3])) == pytest.approx(0.1)
    assert common_scales([scores[:1]]) == (1e9,)  # of one example it may be a result
    assert common_scales([scores + torch.tensor([[0, 0, 0], [0, 1e6, 0]])]) == (1e9,)
    assert common_scales([torch.full((2, 2), -1e9)]) == (1e9,)
    assert common_scales([torch.tensor([[1.0, 1e-9], [1.0, 1e-8]])]) == (1.0,)
    least = [
        torch.tensor([[2.0, torch.finfo(d).min]], dtype=d) for d in (torch.float64, torch.half)
    ]
    assert common_scales(least) == (2.0,)


class Heads(nn.Module):
    """Several outputs, of which one may differ."""

    def __init__(self, error: float = 0.0):
        super().__init__()
        self.error = error

    def forward(self, x):
        return {"sum": x.sum(1), "boxes": [x + self.error, 2 * x], "count": len(x)}


def test_of_several_outputs_each_has_its_error():
    exact, single = compare(answers_of(Heads(), INPUTS), Heads(error=1e-7))
    assert [name for name, _ in exact.outputs] == ["sum", "boxes_0", "boxes_1"]
    assert dict(exact.outputs) == pytest.approx({"sum": 0, "boxes_0": 1e-7, "boxes_1": 0})
    assert exact.error == max(dict(exact.outputs).values())
    assert single.error == max(dict(single.outputs).values())
    found = compare_file(
        "onnx", answers_of(Heads(), INPUTS), lambda given: [given[0].sum(1), given[0], 2 * given[0]]
    )
    assert [name for name, _ in found[0].outputs] == ["sum", "boxes_0", "boxes_1"]


def test_of_one_output_there_is_nothing_more_to_say():
    (check, _) = compare(answers_of(Plus(0.0), INPUTS), Plus(0.0))
    assert check.outputs == ()


def test_outputs_of_one_name_are_told_apart():
    class Twice(nn.Module):
        def forward(self, x):
            return {"a": (x, 2 * x), "a_0": 3 * x}

    (check, _) = compare(answers_of(Twice(), INPUTS), Twice())
    assert [name for name, _ in check.outputs] == ["a_0", "a_1", "a_0 (2)"]


def test_the_outputs_of_parts_are_called_by_their_paths():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 4)

        def forward(self, x):
            return (self.body(x) + self.body(2 * x)).relu()

    model = Two()
    _, checks = compare_in_parts(model, model, ["body"], list(INPUTS))
    names = [name for name, _ in checks[0].outputs]
    assert names == ["body.output", "body.output (2)", "output"]


class Steep(nn.Module):
    """Layers that amplify rounding, beside an output that does not round at all.

    In float32 it has a fault, in the first output alone or in both.
    """

    def __init__(self, gain: float, fault: float = 0.0, of: str = "steep"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=gain)
        self.faults = {of: fault}

    def forward(self, x):
        steep = x
        for layer in self.layers:
            steep = layer(steep).sin()
        faults = self.faults if x.dtype == torch.float32 else {}
        return {
            "steep": steep + faults.get("steep", 0.0),
            "plain": x / 2 + faults.get("plain", 0.0),
        }


@pytest.fixture(scope="module")
def steep():
    """A network that rounds by so much that one and a half times as much has to be measured, and
    ten times as much is no more than may be allowed: its gain, answers and measured rounding."""
    for gain in torch.arange(1.8, 2.4, 0.03).tolist():
        answers = answers_of(Steep(gain), INPUTS)
        rounding, plain = map(max, zip(*answers[0].measured(), strict=True))
        if max(1e-5, 2 * answers[0].rounding) < 1.3 * rounding and 10 * rounding < 1e-4:
            assert plain < 1e-6
            return gain, answers, rounding
    raise AssertionError("none of these networks rounds by so much")


def test_what_rounding_explains_is_no_fault(steep):
    gain, answers, rounding = steep
    fault = 1.5 * rounding * answers[0].scales[0]
    check = float32(Certificate(tuple(compare(answers, Steep(gain, fault)))))
    assert check.error == pytest.approx(1.5 * rounding, rel=0.1)
    runs = [of_steep for of_steep, _ in answers[0].measured()]
    largest = itertools.accumulate(runs, max)
    assert check.rounding == next(each for each in largest if check.error <= 2 * each)
    assert check.tolerance == 2 * check.rounding


def test_no_more_runs_are_made_than_explain_an_error(steep, monkeypatch):
    gain, answers, _ = steep
    largest = [*itertools.accumulate((of_steep for of_steep, _ in answers[0].measured()), max)]
    enough = next(run for run, rounding in enumerate(largest) if 2 * rounding > 1.2e-5)
    fault = 1.9 * largest[enough] * answers[0].scales[0]
    calls = []

    def counted(module, seed):
        calls.append(seed)
        move_values(module, seed)

    monkeypatch.setattr("l0prune.exporting.certify.answers.move_values", counted)
    answers = answers_of(Steep(gain), INPUTS[:1])
    check = float32(Certificate(tuple(compare(answers, Steep(gain, fault)))))
    assert check.rounding == largest[enough]
    assert len(calls) == enough + 1
    assert enough + 1 < RUNS


@torch.no_grad()
def test_ten_times_the_rounding_is_a_fault(steep):
    gain, answers, rounding = steep
    faulty = Steep(gain, 10 * rounding * answers[0].scales[0])
    with pytest.raises(CertificateError, match="graph in float32") as raised:
        Certificate(tuple(compare(answers, faulty)))
    assert f"(rounding alone: {rounding:.1e})" in str(raised.value)
    with pytest.raises(CertificateError, match="onnx in float32"):
        Certificate(tuple(compare_file("onnx", answers, lambda given: [*faulty(*given).values()])))


def test_the_rounding_of_one_output_excuses_no_other(steep):
    gain, answers, rounding = steep
    faulty = Steep(gain, 1.5 * rounding * answers[0].scales[1], "plain")
    with pytest.raises(CertificateError, match=r"allowed 1\.0e-05"):
        Certificate(tuple(compare(answers, faulty)))


def test_rounding_is_measured_only_where_it_decides(steep, monkeypatch):
    gain, _, _ = steep
    answers = answers_of(Steep(gain), INPUTS)
    monkeypatch.setattr("l0prune.exporting.certify.answers.move_values", None)
    check = float32(Certificate(tuple(compare(answers, Steep(gain)))))
    assert check.rounding == answers[0].rounding
    with pytest.raises(TypeError):
        list(answers[0].measured())


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_a_module_that_is_wrong_at_one_batch_size_is_found(wrong):
    """Float64 is compared at the first size alone, float32 at each."""

    class Wrong(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1e-3 * (len(x) == wrong)

    torch.manual_seed(0)
    right = nn.Linear(3, 2)
    answers = answers_of(right, [((torch.randn(size, 3),), {}) for size in (2, 3, 1)])
    assert [len(answer.dtypes) for answer in answers] == [2, 1, 1]
    small = Wrong(3, 2)
    small.load_state_dict(right.state_dict())
    checks = list(compare(answers, small))
    assert {check.batch for check in checks if not check.passed} == {wrong}
    assert sum(check.dtype == "float64" for check in checks) == 1
