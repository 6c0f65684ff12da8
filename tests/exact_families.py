"""Exactness of the export on torchvision's families: what is measured of one network.

Weights are random, BatchNorm statistics and all biases are made non-trivial, and half of the gates
are closed at random while the open ones take fractional values. A result has the largest error of
the dense model in float64 and float32 and of the ONNX file, each relative to the output's scale,
and the parameters: before, as the plan predicts them for these gates, and as they are found in the
dense module and in the ONNX file (which folds BatchNorm into a convolution right before it, and
elsewhere stores its statistics, too).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
import torchvision
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

import l0prune
from benchmarks.scramble import scramble
from l0prune.exporting.certify.certificate import MODEL
from l0prune.plan.cost import CostModel

# The smallest member of each family comes first; the side of the image is what it takes.
FAMILIES: dict[str, tuple[tuple[str, int], ...]] = {
    "AlexNet": (("alexnet", 224),),
    "VGG": (("vgg11_bn", 224), ("vgg16", 224)),
    "ResNet": (("resnet18", 96), ("resnet50", 224)),
    "ResNeXt": (("resnext50_32x4d", 96),),
    "WideResNet": (("wide_resnet50_2", 96),),
    "MobileNetV2": (("mobilenet_v2", 96),),
    "MobileNetV3": (("mobilenet_v3_small", 96), ("mobilenet_v3_large", 224)),
    "EfficientNet": (("efficientnet_b0", 96), ("efficientnet_v2_s", 224)),
    "MNASNet": (("mnasnet0_5", 96),),
    "RegNet": (("regnet_y_400mf", 96),),
    "DenseNet": (("densenet121", 96),),
    "GoogLeNet": (("googlenet", 96),),
    "Inception": (("inception_v3", 299),),
    "SqueezeNet": (("squeezenet1_1", 96),),
    "ShuffleNetV2": (("shufflenet_v2_x0_5", 96),),
    "ConvNeXt": (("convnext_tiny", 96),),
    "ViT": (("vit_b_32", 224), ("vit_b_16", 224)),
    "Swin": (("swin_t", 224),),
}


@dataclass(frozen=True)
class Result:
    """What one model's export measured; errors are relative to the output's scale."""

    name: str
    float64: float
    float32: float
    onnx: float
    allowed: float  # in float32: 1e-5, or more where the gated model itself rounds by more
    before: int
    predicted: int
    found: int
    stored: int  # numbers that meet the input: parameters, buffers, and what follows from them
    in_file: int
    signal: float  # how much the output varies with the input, relative to its scale

    def __str__(self) -> str:
        errors = (self.float64, self.float32, self.onnx, self.allowed)
        counts = (self.before, self.predicted, self.found, self.in_file)
        cells = (*(f"{each:.1e}" for each in errors), *(f"{each:,}" for each in counts))
        return f"| {' | '.join((self.name, *cells))} |"


def build(name: str, side: int) -> tuple[nn.Module, Tensor]:
    """A torchvision model with random weights, and an example of two images."""
    arguments = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **arguments).eval()
    return model, torch.randn(2, 3, side, side)


def measure(name: str, side: int, seed: int = 0) -> Result:
    """Gate, close, export and compare one model; its ONNX file is written and read again."""
    torch.manual_seed(seed)
    model, images = build(name, side)
    scramble(model, ((images,), {}), seed)
    bank = l0prune.gates(model)
    small = l0prune.export(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        small.save_onnx(path, time=False)
        in_file = parameters_in(path)
    with torch.no_grad():
        first, second = model(torch.randn_like(images)), model(torch.randn_like(images))
    worst = small.certificate.worst
    errors = (worst(MODEL, "float64"), worst(MODEL, "float32"), worst("onnx", "float32"))
    return Result(
        name,
        *(float("nan") if error is None else error for error in errors),
        allowed=max(c.tolerance for c in small.certificate.checks if c.dtype == "float32"),
        before=small.params_before,
        predicted=CostModel(bank.plan).actual(bank.open(), "params"),
        found=read_by(small.program),
        stored=stored_by(small.program),
        in_file=in_file,
        signal=float((first - second).abs().max() / first.abs().max()),
    )


def parameters_in(path: Path) -> int:
    """Elements of all floating-point tensors stored in an ONNX file."""
    graph = onnx.load(path).graph
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    sizes = (torch.Size(t.dims).numel() for t in graph.initializer if t.data_type in floats)
    return sum(sizes)


def read_by(program: ExportedProgram) -> int:
    """How many parameters the program reads: a class keeps heads that only training uses, too."""
    names = program.graph_signature.inputs_to_parameters
    nodes = [
        n for n in program.graph.nodes if n.op == "placeholder" and n.name in names and n.users
    ]
    return sum(program.state_dict[names[node.name]].numel() for node in nodes)


def stored_by(program: ExportedProgram) -> int:
    """Floating-point elements that a file needs: of all that follows from no input, what meets it.

    An exporter works it out beforehand: where a table of relative positions is spread over pairs of
    tokens, the file holds the pairs, and not the table. And a mask begins with ``new_zeros``: of
    that only the shape follows from an input.
    """
    inputs = set(program.graph_signature.user_inputs)
    depends: set[Node] = set()
    for node in program.graph.nodes:
        if node.name in inputs or depends.intersection(node.all_input_nodes):
            depends.add(node)
    meeting = [
        node
        for node in program.graph.nodes
        if (node not in depends and depends.intersection(node.users)) or "new_" in str(node.target)
    ]
    values = [n.meta["val"] for n in meeting]
    return sum(v.numel() for v in values if isinstance(v, Tensor) and v.is_floating_point())
