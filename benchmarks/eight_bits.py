"""Files in eight bits: how fast and how far from float32, ours and ONNX Runtime's by default.

    python -m benchmarks.eight_bits [--networks resnet20 resnet20-half resnet50 …] [--size 224]
                                    [--inputs 64]
    python -m benchmarks.eight_bits --predict resnet20 mobilenet_v2 [--size 112] [--samples 48]
    python -m benchmarks.eight_bits --train 0.5 0.25 [--examples 5000] [--epochs 2]
    python -m benchmarks.eight_bits --cut 0.25 --networks resnet18 … [--size 112] [--samples 24]
    python -m benchmarks.eight_bits --half float16 bfloat16 [--networks …] [--size 224]

The first prints milliseconds of a call (one thread, batch 1) of three files of a network, which
take turns: float32, ``onnxruntime.quantization.quantize_static`` as it comes (int8 activations, a
scale for each tensor, least and largest value), and ours. *off* is the root mean square of the
difference to float32, relative to the outputs, and *same* the share of inputs with the same largest
score, on inputs that neither was calibrated with; *without* is *off* of ours when no weights make
up for the rounding. Of ``--inputs`` three in four calibrate, and one in four chooses; *off* is of
as many more, that did neither.

``resnet20`` is the published one on CIFAR-10 (``$L0PRUNE_DATA``), ``resnet20-half`` cut to half of
its MACs by magnitude, in eights. The others are torchvision's with random weights, and BatchNorm
statistics of the smooth noise that stands for images: times are theirs, and errors compare the two
quantizers only, since networks that have learned nothing amplify noise.

The second times int8 files at random widths and prints how well ``measure`` predicts those that it
has not seen.

The third cuts ResNet-20 to these shares of its MACs, in eights, and trains what is left on part of
CIFAR-10: as ever, and with ``quantize="int8"``. It prints the test errors of both files of each, on
2,000 images.

The fourth cuts networks by group magnitude to a time in eight bits, a share of the dense network's
in float32, by a table of int8 times; *measured* is the file's over the budget. The rival is cut to
as many MACs by the same score, to widths that a table of times in float32 likes, then quantized.
All files take turns, and all that can be is in eight bits.

The fifth prints what files in 16 bits differ by (``Export.half``) on the certificate's inputs.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import l0prune
from benchmarks.faster import save
from benchmarks.runner import machine, options, published, table
from l0prune.capture.threads import muted
from l0prune.data import Data, Tensors
from l0prune.data.dataset import WHOLE
from l0prune.errors import UsageError, first_line
from l0prune.exporting.onnx import collect
from l0prune.exporting.opened import OnnxFile
from l0prune.features.int8.calibration import divided
from l0prune.features.int8.quantizer import Feed, Quantizer, in_int8
from l0prune.features.int8.search import Comparison, Search
from l0prune.features.latency.network_files import Exporter, Network
from l0prune.plan.measures import measure_of
from l0prune.running.batches import test_batches
from l0prune.running.evaluate import evaluate_batches
from l0prune.running.task import Task

NETWORKS = ("resnet20", "resnet20-half", "resnet50", "mobilenet_v2", "efficientnet_b0")
TURNS = 30
Cells = list[str]


def smooth_noise(count: int, size: int) -> Tensor:
    """Images of noise whose neighbours are alike."""
    return nn.functional.interpolate(
        torch.randn(count, 3, size // 16, size // 16), size=size, mode="bicubic"
    )


def resnet20() -> nn.Module:
    """The published network on CIFAR-10, in eval mode."""
    return published("resnet20").eval()


def built(name: str, size: int, inputs: int = 16) -> tuple[nn.Module, Tensor]:
    """The network of this name in eval mode, and inputs of it."""
    torch.manual_seed(0)
    if name.startswith("resnet20"):
        model = resnet20()
        images, _ = next(
            l0prune.load_data("cifar10").train.batches(
                inputs, generator=torch.Generator().manual_seed(0)
            )
        )
        if name.endswith("half"):
            l0prune.gate(model, images[:2])
            l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"), round_to=8)
            model = l0prune.export(model, verify="float32").module
        return model, images
    images, model = smooth_noise(inputs, size), getattr(torchvision.models, name)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(images[:16])
    return model.eval(), images


class Reader:
    """Inputs as ONNX Runtime's quantizer reads them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._left, None)


def by_default(path: Path, feeds: Sequence[Feed], to: Path) -> None:
    """ONNX Runtime's quantizer as it comes."""
    from onnxruntime.quantization import quantize_static

    quantize_static(str(path), str(to), Reader(feeds))


def error_of(path: Path, task: Task, batches: int | None = None) -> float:
    """Share of the test images that a file tells wrong, of all or of some batches of 100."""
    cpu = torch.device("cpu")
    images = islice(test_batches(task, 100, cpu, WHOLE), batches)
    return evaluate_batches(OnnxFile(path), images, task, cpu)["error"]


def row(name: str, size: int, inputs: int, folder: Path) -> Cells:
    """A row of the table."""
    paths = {key: folder / f"{key}.onnx" for key in ("float32", "default", "plain", "ours")}
    model, images = built(name, size, 2 * inputs)
    with muted():
        save(model, (images[:2],), str(paths["float32"]))
    given = collect.Network(paths["float32"], 1, collect.CPU)
    (first,) = given.session.get_inputs()
    feeds = [{first.name: part.numpy()} for part in images.split(4)]
    feeds, fresh = feeds[: len(feeds) // 2], feeds[len(feeds) // 2 :]
    seen, unseen = divided(feeds)
    comparison = Comparison(given, fresh)
    with muted():
        by_default(paths["float32"], seen, paths["default"])
    quantizer = Quantizer.of(paths["float32"], seen, folder)
    search = Search(quantizer, Comparison(given, unseen), folder / "tried.onnx")
    search.run()
    search.keep_slow([images[:1].numpy()], 1)
    paths["plain"].write_bytes(search.made().SerializeToString())
    without = comparison.worst(collect.Network(paths.pop("plain"), 1, collect.CPU))
    search.compensate(seen)
    paths["ours"].write_bytes(search.made().SerializeToString())
    networks = {key: collect.Network(path, 1, collect.CPU) for key, path in paths.items()}
    one = {first.name: images[:1].numpy()}
    ms = by_turns(networks, one)
    cells = [name, f"{ms['float32']:.3g}"]
    for key in ("default", "ours"):
        errors, same = comparison.with_outputs(comparison.outputs(networks[key]))
        (error,), (share,) = errors.values(), same.values()
        cells += [f"{ms[key]:.3g}", f"{error:.2%}", f"{share:.0%}"]
    cells.insert(-2, f"{without:.2%}")
    kept = ", ".join(search.kept) or "–"
    return [*cells, f"{ms['float32'] / ms['ours']:.2f}", search.method, kept]


def predicted(name: str, size: int, samples: int) -> Cells:
    """How well a table of int8 times predicts networks that it has not seen."""
    model, images = built(name, size)
    l0prune.gate(model, images[:2])
    found = l0prune.measure(model, runtime="onnxruntime-int8", samples=samples)
    quality, blocks = found.quality, found.of(l0prune.gates(model).plan).blocks()
    most = max(set(blocks), key=blocks.count)
    errors = (f"{error:.1%}" for error in (quality.median, quality.worst, quality.noise))
    return [name, f"{found.dense:.3g}", str(quality.networks), *errors, str(most)]


def trained(share: float, examples: int, epochs: int) -> Iterator[Cells]:
    """Two rows of the table: the same widths, trained without and with the knowledge."""
    for quantize in (None, "int8"):
        model, images = built("resnet20", 32)
        source = l0prune.load_data("cifar10")
        parts = [
            Tensors(*next(of.batches(size, generator=torch.Generator().manual_seed(1))))
            for of, size in ((source.train, examples), (source.test, 2000))
        ]
        data = Data("cifar10", *parts, 10)
        l0prune.gate(model, images[:2])
        l0prune.fit(model, f"macs={share}", l0prune.score(model, "magnitude"), round_to=8)
        l0prune.finetune(
            model, data, learn=False, epochs=epochs, quantize=quantize, progress=False, report=False
        )
        made = l0prune.export(model, verify="float32")
        with tempfile.TemporaryDirectory() as folder:
            made.save_onnx(Path(folder) / "model.onnx", int8=data)
        assert made.int8 is not None
        (off,), (float32, int8) = made.int8.errors.values(), made.int8.metrics["error"]
        cells = [f"{share:.0%}", quantize or "plain", f"{float32:.2%}", f"{int8:.2%}", f"{off:.1%}"]
        yield [*cells, f"{1 / made.int8.times.share:.2f}", made.int8.method]


def cut(name: str, size: int, share: float, samples: int) -> Cells:
    """A row of the table: cut by times in eight bits, and by those in float32 to the same MACs."""
    model, images = built(name, size)
    l0prune.gate(model, images[:2], branches=False)
    gates, scores = l0prune.gates(model), l0prune.score(model, "group-magnitude")
    macs = measure_of(gates.plan, "macs")
    tables = {
        each: l0prune.measure(model, runtime=each, samples=samples)
        for each in ("onnxruntime", "onnxruntime-int8")
    }

    def fitted(budget: str, runtime: str) -> float:
        gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
        l0prune.fit(model, budget, scores, latency=tables[runtime])
        return float(macs.actual(gates.open())) / macs.dense()

    exporters = {"dense": Exporter(model, 1), "int8": Exporter(model, 1, in_int8)}
    whole = torch.ones_like(gates.open())
    made = {"dense": exporters["dense"].network_of(whole)}
    ms = timed({**made, "in int8": exporters["int8"].network_of(whole)})
    try:
        kept = fitted(f"latency={share * ms['dense'] / ms['in int8']:.5g}", "onnxruntime-int8")
    except UsageError as error:
        return [name, f"{ms['dense']:.3g}", f"{share:g}: {first_line(error)}"]
    made["ours"] = exporters["int8"].network_of(gates.open())
    rival = fitted(f"macs={kept:.6f}", "onnxruntime")
    made["rival"] = exporters["int8"].network_of(gates.open())
    ms = timed(made)
    cells = [name, f"{ms['dense']:.3g}", f"{share:g}", f"{ms['ours']:.3g}"]
    cells += [f"{ms['ours'] / ms['dense'] / share:.3f}", f"{kept:.1%}"]
    return [*cells, f"{ms['rival']:.3g}", f"{rival:.1%}", f"{ms['rival'] / ms['ours']:.2f}"]


def timed(made: Mapping[str, Network]) -> dict[str, float]:
    """Milliseconds of files that take turns, on the same inputs."""
    with tempfile.TemporaryDirectory() as folder:
        networks = {}
        for key, each in made.items():
            path = Path(folder) / f"{key}.onnx"
            path.write_bytes(each.model.SerializeToString())
            networks[key] = collect.Network(path, 1, collect.CPU)
    inputs = {name: value.numpy() for name, value in made["dense"].inputs.items()}
    return by_turns(networks, inputs)


def by_turns(networks: Mapping[str, collect.Network], inputs: Feed) -> dict[str, float]:
    """Milliseconds of a call of each network, by its share of the first one's in each turn."""
    times: dict[str, list[float]] = {key: [] for key in networks}
    for _ in range(TURNS):
        for key, network in networks.items():
            network.median(inputs, 1)
            times[key].append(network.median(inputs, 3))
    first = next(iter(times.values()))
    return {key: collect.typical(first) * collect.share(each, first) for key, each in times.items()}


def in_16_bits(name: str, size: int, dtypes: Sequence[str], folder: Path) -> Iterator[Cells]:
    """Rows of the table, one for each dtype."""
    model, images = built(name, size)
    l0prune.gate(model, images[:2], branches=False)
    dense = l0prune.export(model, verify="float32")
    for dtype in dtypes:
        dense.save_onnx(folder / "model.onnx", dtype=dtype)
        found = dense.half
        assert found is not None
        (error,), (same,) = found.errors.values(), found.agreement.values()
        time = "–" if found.times is None else f"{1 / found.times.share:.2f}"
        share = found.bytes[0] / found.bytes[1]
        yield [name, dtype, f"{error:.2%}", f"{same:.0%}", f"{share:.0%}", time]


def chosen(given: Namespace, folder: Path) -> tuple[str, Iterator[Cells]]:
    """The head and the rows of the table that is asked for."""
    names, size = given.networks, given.size
    if given.train:
        rows = (row for x in given.train for row in trained(x, given.examples, given.epochs))
        return "MACs | training | float32, error | int8, error | off | × | by", rows
    if given.cut:
        rows = (cut(name, size, share, given.samples) for name in names for share in given.cut)
        return " | float32, ms | budget | ours, ms | measured | MACs | rival, ms | MACs | ×", rows
    if given.half:
        rows = (row for name in names for row in in_16_bits(name, size, given.half, folder))
        return " | dtype | off | same | bytes | ×", rows
    if given.predict:
        rows = (predicted(name, size, given.samples) for name in given.predict)
        return " | dense, ms | networks | median | worst | noise | block", rows
    ours = "float32, ms | default, ms | off | same | ours, ms | without | off | same | × | by"
    return f" | {ours} | in float32", (row(name, size, given.inputs, folder) for name in names)


def main() -> None:
    given = options(
        __doc__, networks=[*NETWORKS], predict=[str], train=[float], cut=[float], half=[str],
        examples=5000, epochs=2, size=224, inputs=64, samples=48,
    )  # fmt: skip
    print(f"{machine()}, batch 1")
    with tempfile.TemporaryDirectory() as name:
        table(*chosen(given, Path(name)))


if __name__ == "__main__":
    main()
