"""Example inputs that are guessed: what is tried first, and what is said where nothing fits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from l0prune.errors import UsageError
from l0prune.features.example_guess.guess import guess_example
from l0prune.files.model_sources import parse_input


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 2)

    def forward(self, x):
        return self.layer(x.view(x.size(0), -1))


class Patches(nn.Module):
    """Its first layer says the size of a patch and not of the image."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, 4)

    def forward(self, image):
        assert image.shape[2:] == (64, 64)
        patches = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
        return self.layer(patches.reshape(len(image), 64, -1)).mean(1)


class Sequences(nn.Module):
    """Of inputs without a batch it makes one sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)
        self.mixed = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, x):
        return self.last(self.mixed(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(5, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids, scale=1):
        return self.last(self.words(ids)) * scale


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(6, 8)

    def forward(self, *, left, right):
        return self.left(left) + self.right(right)


class Signs(nn.Module):
    """Its outputs are of several dtypes, one of them no number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y > 0, y.argmax(1), y / y.sign().clamp(0), torch.complex(y, y), y.mean()


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 4, 3)

    def forward(self, one, other):
        return self.layer(one) - self.layer(other)


def images(channels, side, **says):
    """A network for images of one size, with attributes by which libraries speak."""
    flat = 2 * (side - 2) ** 2
    model = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(flat, 3))
    for name, value in says.items():
        setattr(model, name, value)
    return model


SMALL = {"input_size": (3, 20, 20)}
WAVES = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(8 * 62, 2))
FIRST = "its first layer, 0"


@pytest.mark.parametrize(
    ("make", "text", "origin"),
    [
        (Flat, "2x784", "its first layer, layer"),
        (Patches, "2x3x64x64", "its first layer, layer"),
        (Sequences, "2x16x12", "its first layer, first"),
        (Recurrent, "2x16x5", "its first layer, layer"),
        (Tokens, "2x16:int64", "its first layer, words"),
        (Pair, "left=2x4,right=2x6", "its first 2 layers"),
        (Signs, "2x4", "its first layer, layer"),
        (Several, "2x1x224x224,2x1x224x224", "its first layer, layer"),
        (lambda: nn.Linear(4, 3).double(), "2x4:float64", "its first layer"),
        (lambda: WAVES, "2x4x64", FIRST),
        (lambda: images(1, 8), "2x1x8x8", FIRST),
        (lambda: images(1, 50), "2x1x50x50", FIRST),
        (lambda: images(1, 20, pretrained_cfg=SMALL), "2x1x20x20", "its pretrained_cfg (timm)"),
        (lambda: images(3, 28, pretrained_cfg=SMALL), "2x3x28x28", FIRST),
        (
            lambda: images(3, 20, config=SimpleNamespace(image_size=20)),
            "2x3x20x20",
            "its configuration (transformers)",
        ),
        (
            lambda: images(3, 20, example_input_array=torch.ones(4, 3, 20, 20)),
            "4x3x20x20",
            "its example_input_array",
        ),
    ],
)
def test_the_first_input_on_which_the_model_runs(make, text, origin):
    model = make()
    assert guess_example(model) == (text, origin)
    args, kwargs = parse_input(text)
    model(*args, **kwargs)


def test_dummy_inputs_of_transformers_by_name():
    model = Tokens()
    model.dummy_inputs = {"ids": torch.ones(3, 5, dtype=torch.int64)}
    assert guess_example(model) == ("ids=3x5:int64", "its dummy_inputs")


@pytest.mark.slow
def test_torchvision_says_the_size_of_its_weights_and_of_no_other_network():
    models = pytest.importorskip("torchvision.models")
    found = guess_example(models.efficientnet_b1())
    assert found.text == "2x3x240x240"
    assert "EfficientNet_B1_Weights" in found.origin
    ten = models.resnet18(num_classes=10)
    assert guess_example(ten) == ("2x3x224x224", "its first layer, conv1")
    assert guess_example(ten, 32) == ("2x3x32x32", "the images in this folder")
    origin = guess_example(models.resnet18(), 32).origin
    assert "the images in this folder (the transforms of the weights ResNet18_Weights." in origin
    assert "says 224x224)" in origin


def test_images_come_before_what_libraries_say_and_a_conflict_is_named():
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    assert guess_example(pooled, 20) == ("2x3x20x20", "the images in this folder")
    assert guess_example(pooled).text == "2x3x224x224"
    pooled.pretrained_cfg = {"input_size": (3, 48, 48), "num_classes": 1000}
    found = guess_example(pooled, 20)
    said = "its pretrained_cfg (timm) says 48x48"
    assert found == ("2x3x20x20", f"the images in this folder ({said})")
    assert guess_example(pooled, 48) == ("2x3x48x48", "the images in this folder")
    pooled.num_classes = 4
    found = guess_example(pooled)
    assert found.text == "2x3x48x48"
    assert "of weights with 1,000 classes, not 4" in found.origin
    found = guess_example(images(3, 28, pretrained_cfg={"input_size": (3, 28, 28)}), 20)
    assert found.text == "2x3x28x28"
    assert "the model does not run on 20x20, the size of the images in this folder" in found.origin


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.sizes = []

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        return self.layer(x)


def test_the_model_stays_as_it_is():
    model = Counting().train()
    state = torch.get_rng_state()
    assert guess_example(model).text == "2x4"
    assert model.calls == 0
    assert model.sizes == []
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_tried_is_said():
    odd = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(77, 2))
    with pytest.raises(UsageError) as raised:
        guess_example(odd)
    said = str(raised.value)
    assert "Its first layer, 0, is Conv2d(1, 8" in said
    assert "2x1x224x224 did not work (RuntimeError: mat1 and mat2 shapes cannot be" in said
    assert "nor did 2x1x256x256, 2x1x32x32" in said
    assert "--input 1x3x224x224" in said


class Pair(nn.Module):
    def forward(self, patches, grid, scale=1.0):
        return patches.view(7, 11, grid.shape[0])


def test_the_inputs_of_a_forward_are_named():
    with pytest.raises(UsageError, match=r"takes patches, grid: .* --input patches=SHAPE,grid="):
        guess_example(Pair())


class Refusing(nn.Module):
    def forward(self, x):
        raise ValueError("never")


def test_a_model_without_layers():
    with pytest.raises(UsageError, match=r"guessed\. 2x3x224x224 did not work \(ValueError: never"):
        guess_example(Refusing())
    assert guess_example(nn.MaxPool2d(2)) == ("2x3x224x224", "usual sizes of images")


class Both(nn.Module):
    """As a model of transformers that compares texts and images."""

    dummy_inputs = {"input_ids": torch.ones(3, 5, dtype=torch.int64)}  # noqa: RUF012
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=20, num_channels=1))

    def __init__(self):
        super().__init__()
        self.words, self.pixels = nn.Embedding(9, 4), nn.Linear(400, 4)

    def forward(self, input_ids=None, pixel_values=None):
        return self.words(input_ids).mean(1) @ self.pixels(pixel_values.flatten(1)).T


def test_a_text_and_an_image():
    found = guess_example(Both())
    assert found.text == "input_ids=3x5:int64,pixel_values=3x1x20x20"
    assert found.origin == "its dummy_inputs and configuration (transformers)"
