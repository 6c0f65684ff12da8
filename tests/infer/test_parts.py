"""Models that torch.export cannot follow as a whole: captured, gated and cut in parts."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from deadness import close_some, randomise
from differences import learned_on, run_onnx
from models import Broken, small
from torch import nn

import l0prune
from l0prune.errors import CaptureError, UsageError


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.out = nn.Conv2d(10, 6, 1)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))))


class Detector(nn.Module):
    """A list of images in; how many things come out, their values decide."""

    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.refine = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
        self.head = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
        self.threshold = 0.0

    def forward(self, images):
        found = []
        for image in images:
            features = self.stem(image.unsqueeze(0))[0].flatten(1).T
            kept = features[features.sum(1) > self.threshold]
            for _ in range(2):
                kept = kept + self.refine(kept)
            found.append({"boxes": self.head(kept), "score": kept.sum(1).sigmoid()})
        return found


def images(seed=0, side=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, side, side, generator=generator) for _ in range(2)]


def detector(seed=0):
    torch.manual_seed(seed)
    return randomise(Detector()).eval()


def test_the_largest_parts_that_can_be_captured_are_surveyed():
    model = detector()
    found = l0prune.survey(model, (images(),), own_class=False)
    assert set(found.plan.parts) == {"stem", "refine", "head"}
    assert {(a.name, a.size) for a in found.axes} == {
        ("stem.conv", 10),
        ("refine.0", 12),
        ("head.0", 9),
    }
    assert found.params == sum(p.numel() for p in model.parameters())
    assert "captured in parts: stem, refine, head" in " ".join(str(found).split())
    assert found.to_dict()["parts"] == list(found.plan.parts)


@pytest.mark.slow
def test_macs_are_those_of_one_image_over_all_calls():
    """The stem runs once for each of two images; the refinement four times on what is kept."""
    model = detector()
    model.threshold = float("-inf")  # every one of the 25 places is kept
    found = l0prune.survey(model, (images(),), own_class=False)
    stem, refine, head = 25 * (10 * 27 + 60), 25 * (72 + 72), 25 * (54 + 36)
    assert found.macs == stem + 2 * refine + head


@pytest.mark.parametrize("threshold", [pytest.param(0.0, marks=pytest.mark.slow), float("inf")])
@pytest.mark.slow
def test_the_export_is_exact_even_where_nothing_is_found(threshold):
    model = detector()
    model.threshold = threshold
    plain = copy.deepcopy(model)
    l0prune.gate(model, (images(),))
    for a, b in zip(plain(images(3)), model.eval()(images(3)), strict=True):
        torch.testing.assert_close(a, b)
    close_some(model)
    small = l0prune.export(model)
    assert isinstance(small.module, Detector)
    assert small.rebuilt
    assert small.note == ""
    assert small.params == sum(p.numel() for p in small.module.parameters()) < small.params_before
    with torch.no_grad():
        for a, b in zip(model(images(7, 8)), small.module(images(7, 8)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_part_is_a_file_that_takes_inputs_of_any_size(tmp_path):
    model = close_some(l0prune.gate(detector(), (images(),)))
    small = l0prune.export(model)
    files = small.save_onnx(tmp_path / "model.onnx")
    assert {f.name for f in files} == {f"model.{part}.onnx" for part in ("stem", "refine", "head")}
    for part, shape in (("stem", (4, 3, 7, 11)), ("refine", (4, 6)), ("head", (4, 6))):
        x = torch.randn(shape)
        (written,) = run_onnx(tmp_path / f"model.{part}.onnx", x)
        expected = model.get_submodule(part)(x)
        torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="in parts"):
        _ = small.program
    assert len(small.save(tmp_path / "model.pt2")) == 3
    small.save(tmp_path / "model.pt")
    manifest = json.loads(torch.load(tmp_path / "model.pt", weights_only=True)["manifest"])
    assert manifest["rebuild"]["verified"]
    assert manifest["attributes"]["stem.conv"]["out_channels"] < 10


@pytest.mark.slow
def test_a_part_whose_name_is_no_file_name_is_written_beside_the_others(tmp_path):
    model = detector()
    piece = l0prune.export(l0prune.gate(model, (torch.stack(images()),))).pieces[0]
    for path in ("layers.a/b", "layers./etc/x", "layers.a\\b"):
        file = replace(piece, path=path).file_of(tmp_path / "model.onnx")
        assert file.parent == tmp_path
        assert file.name.startswith("model.layers.")


@pytest.mark.slow
def test_gates_survive_a_file_and_a_training_step(tmp_path):
    model = l0prune.gate(detector(), (torch.stack(images()),))
    optimizer = torch.optim.Adam(l0prune.param_groups(model))
    model.train()
    loss = sum(f["boxes"].square().mean() for f in model(images())) + l0prune.penalty(model, 1e-3)
    loss.backward()
    assert l0prune.gates(model).log_alpha.grad.ne(0).all()
    optimizer.step()
    l0prune.save(model.eval(), tmp_path / "gated.pt")
    again = l0prune.load(tmp_path / "gated.pt", detector(1))
    assert l0prune.gates(again).plan.parts == l0prune.gates(model).plan.parts
    torch.testing.assert_close(again(images()), model(images()))


@pytest.mark.slow
def test_a_part_whose_class_does_not_fit_runs_as_its_graph():
    class ByWidth(Stem):
        def forward(self, x):
            x = torch.relu(self.norm(self.conv(x)))
            return self.out(x / x.shape[1])

    model = detector()
    model.stem = randomise(ByWidth()).eval()
    close_some(l0prune.gate(model, (images(),)))
    small = l0prune.export(model)
    assert not small.rebuilt
    assert "stem is the captured graph, not of its own class" in small.note
    assert "computes something else at these sizes" in small.note
    assert small.params == sum(p.numel() for p in small.module.parameters()) < small.params_before
    torch.testing.assert_close(model(images(5)), small.module(images(5)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_weights_that_two_parts_share_stay_whole():
    model = detector()
    model.head[0] = nn.Linear(6, 12)
    model.head[2] = nn.Linear(12, 4)
    model.head[0].weight = model.refine[0].weight
    found = l0prune.survey(model, (images(),), own_class=False)
    assert {a.name for a in found.axes} == {"stem.conv"}
    assert found.params == sum(p.numel() for p in model.parameters())


def test_what_lies_between_the_parts_is_accounted_for():
    class Between(Detector):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(6, 6))
            self.spare = nn.Linear(3, 3)

        def forward(self, images):
            return [f["boxes"] @ self.mix[:4, :4] for f in super().forward(images)]

    model = Between()
    found = l0prune.survey(model, (images(),), own_class=False)
    reasons = {pin.where: pin.reason for pin in found.pins}
    assert reasons["mix dim 0"] == "code that torch.export cannot follow may use it"
    (mix,) = [layer for layer in found.layers if layer.name == "mix"]
    assert mix.input.reason == "code that torch.export cannot follow may use it"
    assert reasons["spare.weight dim 1"] == "code that torch.export cannot follow may use it"
    assert found.params == sum(p.numel() for p in model.parameters())


class InAList(Broken):
    def __init__(self):
        super().__init__()
        self.first, self.rest = small(), nn.ModuleList([small(), small()])

    def layers(self):
        return [self.first, *self.rest]


class SharedInside(Broken):
    def __init__(self):
        super().__init__()
        shared = small()
        self.pair, self.again = nn.Sequential(shared, nn.Linear(4, 4)), shared

    def layers(self):
        return [self.pair, self.again]


class TiedOutside(Broken):
    """The code between the parts reads a weight of one of them."""

    def __init__(self):
        super().__init__()
        self.part, self.other = small(), small()
        self.weight = self.part[0].weight

    def layers(self):
        return [self.part, lambda x: nn.functional.linear(x, self.weight)[:, :4], self.other]


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (InAList, {"first.0", "rest.0.0", "rest.1.0"}),
        (SharedInside, set()),
        (TiedOutside, {"other.0"}),
    ],
)
@pytest.mark.one_in(3)
def test_parts_in_containers_and_weights_that_others_read(kind, axes):
    model, x = randomise(kind()).eval(), torch.randn(3, 4)
    if not axes:
        with pytest.raises(CaptureError):
            l0prune.survey(model, x)
        return
    found = l0prune.survey(model, x)
    assert {axis.name for axis in found.axes} == axes
    assert found.params == sum(p.numel() for p in model.parameters())
    small = l0prune.export(close_some(l0prune.gate(model, x)))
    assert small.params == sum(p.numel() for p in small.module.parameters()) < found.params
    torch.testing.assert_close(model(x), small.module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_survey_leaves_the_example_the_buffers_and_the_generator_alone():
    class Counting(InAList):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return super().forward(x.add_(torch.rand(())))

    model, x = Counting(), torch.ones(3, 4)
    state = torch.get_rng_state()
    l0prune.survey(model, x)
    assert torch.equal(x, torch.ones(3, 4))
    assert model.count == 0
    assert torch.equal(state, torch.get_rng_state())


def test_a_part_that_is_not_called_on_fresh_inputs():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = small(), small()

        def forward(self, x):
            return self.a(x) if x[0, 0].item() == 123.0 else self.b(x)

    x = torch.randn(3, 4)
    x[0, 0] = 123.0
    model = close_some(l0prune.gate(randomise(Choosing()).eval(), x))
    assert {piece.path for piece in l0prune.export(model).pieces} == {"a"}


@pytest.mark.slow
def test_a_part_called_with_two_numbers_of_dims_is_a_file_for_each(tmp_path, timed):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            pooled = self.part(x.mean(1))
            x = self.part(x)
            return x + pooled[:, None] if pooled.sum().item() < 1e9 else x

    model = close_some(l0prune.gate(randomise(Pooled()).eval(), torch.randn(2, 3, 8)))
    small = l0prune.export(model)
    files = small.save_onnx(tmp_path / "m.onnx")
    assert "Not timed: the model is in several files" in small.note
    assert [file.name for file in files] == ["m.part.onnx", "m.part-2.onnx"]
    assert small.to_dict()["parts"] == ["part"]
    for file, shape in zip(files, [(5, 8), (5, 3, 8)], strict=True):
        (written,) = run_onnx(file, x := torch.randn(shape))
        torch.testing.assert_close(written, model.part(x), rtol=1e-4, atol=1e-5)
    assert len(learned_on(small).pieces) == 2


def test_a_part_called_in_two_ways_is_looked_into():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x, mask=None):
            return self.inner(x) if mask is None else self.inner(x) * mask

    class Twice(Broken):
        def __init__(self):
            super().__init__()
            self.part = Masked()

        def layers(self):
            return [self.part, lambda x: self.part(x, mask=(x > 0).float())]

    assert l0prune.survey(Twice(), torch.randn(3, 4)).plan.parts == ("part.inner",)
