"""Launches of a gated step and of a plain one, counted on the CPU.

Counted is each operator of ATen that is no view, in forward, backward, penalty and optimizer, and
each launch of Triton, which is not run. A step on a GPU is a line of such launches: where
they are short, their number is its time.

    python -m benchmarks.kernels [--models resnet50 vit_b_16] [--size 64] [--compile]

With ``--compile`` the forward is compiled, and counted are the kernels that inductor makes of it
and of its backward pass, for a CPU: so many for a GPU, if it fuses there what it fuses here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch._inductor import metrics

import l0prune
from benchmarks.runner import options
from benchmarks.step import stepper
from l0prune.capture.compat import TorchDispatchMode, replaced
from l0prune.gating import products

# Operators that start nothing on a GPU: views and questions about a tensor.
_SILENT = {"aten.detach", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.set_"}
_SILENT |= {"aten.empty_strided", "aten.new_empty_strided", "aten.lift_fresh", "aten.is_same_size"}


class Launches(TorchDispatchMode):
    """Counter of launches by operator, as a context."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count an operator and run it."""
        name = str(func.overloadpacket)
        if not func.is_view and name not in _SILENT:
            self.by_operator[name] += 1
        return func(*args, **(kwargs or {}))


def count(step: Callable[[], None]) -> Counter[str]:
    """Return the launches of a step that was done before, as often as it took to settle."""
    with Launches() as counter, counted_by(counter):
        step()
    return counter.by_operator


@contextmanager
def counted_by(counter: Launches | None) -> Iterator[None]:
    """Within the context Triton launches nothing, on any device; a counter notes what it would."""
    kernels = products.kernels()
    assert kernels is not None, "Triton is not installed"

    def note(kernel: Any, *_: Any, **__: Any) -> None:
        if counter is not None:
            counter.by_operator[f"triton.{kernel.fn.__name__}"] += 1

    everywhere = replaced(products, "runs_on", lambda device: True)
    with everywhere, replaced(kernels, "launch", note):
        yield


def step_of(
    model: nn.Module,
    images: Tensor,
    autocast: torch.dtype | None = torch.bfloat16,
    *,
    compiles: bool = False,
) -> Callable[[], None]:
    """A step: loss, penalty of a gated model, backward and Adam; the forward maybe compiled."""
    return stepper(
        model,
        images,
        torch.zeros(len(images), dtype=torch.int64),
        make=partial(torch.optim.Adam, lr=1e-3, foreach=True),
        context=partial(torch.autocast, "cpu", autocast or torch.bfloat16, autocast is not None),
        run=torch.compile(model) if compiles else None,
    )


def compiled(step: Callable[[], None]) -> int:
    """Return how many kernels the compiler makes in a step."""
    torch._dynamo.reset()
    metrics.reset()
    with counted_by(None):
        step()
    return metrics.generated_kernel_count


def main() -> None:
    args = options(
        __doc__, threads=None, models=["resnet50", "vit_b_16", "mobilenet_v2"],
        size=(32, "of the images (ViT: 224)"), autocast=(False, "to bfloat16"),
        compile=(False, "count kernels of the compiler"),
    )  # fmt: skip
    for name in args.models:
        torch.manual_seed(0)
        size = 224 if name.startswith("vit") else args.size
        images = torch.randn(2, 3, size, size)
        counts = []
        for is_gated in (False, True):
            model = torchvision.models.get_model(name, weights=None).train()
            model.to(memory_format=torch.channels_last)
            if is_gated:
                l0prune.gate(model, (images,))
            dtype = torch.bfloat16 if args.autocast else None
            step = step_of(model, images, dtype, compiles=args.compile)
            if args.compile:
                counts.append(Counter(kernels=compiled(step)))
                continue
            with counted_by(None):
                for _ in range(2):  # what is read is known after the first
                    step()
            counts.append(count(step))
        plain, gated = (sum(found.values()) for found in counts)
        print(f"{name:16} plain {plain:5} gated {gated:5} ratio {gated / plain:.3f}", flush=True)


if __name__ == "__main__":
    main()
