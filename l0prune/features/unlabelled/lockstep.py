"""Forwards that pause at each weight that they read, so that several run in lockstep.

The inputs of a layer in a cut network depend on the changes to the layers before it. A paused
forward holds only the activations that it still needs, so one pass over all batches is enough, for
any code of the network.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.capture.compat import OpOverload, TorchDispatchMode, below_autograd, version_of
from l0prune.features.unlabelled.tape import Tape
from l0prune.files.artifact import named_tensors
from l0prune.running.batches import call
from l0prune.selection.matrices import Product, product_of

OTHER_WAYS = (
    "the network's forward takes other ways for other inputs (where one reads {0}, another reads "
    "something else), and so cannot be compensated: fit without compensate, and train afterwards"
)
_BLOCK = 1 << 22  # elements that are copied at a time


class View(NamedTuple):
    """Elements of a parameter, and their places in the matrix that they are read as.

    Attributes:
        name: of the parameter.
        begin: distance of the first element from the parameter's first.
        shape, strides: of what the operator reads.
        form: of the product; see ``Product``.
    """

    name: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: tuple[Any, ...] = ()


class Weights:
    """Names of a model's tensors, by their memory."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {name: tensor for name, tensor in named_tensors(model) if tensor.numel()}
        self._names = {_memory(tensor): name for name, tensor in reversed(self.tensors.items())}

    def name(self, value: Any) -> str | None:
        """Return the name of the tensor that a value is a view of; None for other values."""
        return self._names.get(_memory(value)) if isinstance(value, Tensor) else None

    def view(self, value: Any, form: tuple[Any, ...] = ()) -> View | None:
        """Return which elements of which tensor a value is a view of; None for other values."""
        name = self.name(value)
        if name is None:
            return None
        begin = value.storage_offset() - self.tensors[name].storage_offset()
        pairs = zip(value.shape, value.stride(), strict=True)
        strides = tuple(stride if size > 1 else 0 for size, stride in pairs)
        return View(name, begin, tuple(value.shape), strides, form)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(slots=True)
class Read:
    """A weight that a forward is about to multiply with.

    Attributes:
        view: the elements of the weight that it reads.
        operator: the operator that multiplies.
        args: its arguments.
        product: how the arguments are multiplied, as matrices.
        real: mask of the places of the inputs that are no padding; see ``real_places``.
        number: of the operator, in its forward.
        out: the result; None before it is computed.
        stream: the tensor that the result is going to be added to, where that is known.
    """

    view: View
    operator: OpOverload
    args: tuple[Any, ...]
    product: Product
    real: Tensor | None = None
    number: int = 0
    out: Tensor | None = None
    stream: Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self.view.name

    @property
    def weight(self) -> Tensor:
        """The weight as the product reads it, a view of the parameter."""
        return self.product.read(self.args)

    @property
    def bias(self) -> Tensor | None:
        """The bias, where there is one."""
        found: Tensor | None = None if self.product.bias is None else self.args[self.product.bias]
        return found

    @property
    def given(self) -> Tensor:
        """The factor that the weight multiplies."""
        which = (self.product.weight, self.product.bias)
        found: Tensor
        found, *_ = (a for n, a in enumerate(self.args) if n not in which and isinstance(a, Tensor))
        return found

    @property
    def rows(self) -> int:
        """Number of rows that the weight multiplies, in each group."""
        groups, _, outputs = self.product.matrix(self.weight).shape
        return self.run().numel() // (groups * outputs)

    def row_blocks(self, most: int, seed: int, places: int = 1) -> Iterator[Tensor]:
        """Yield, in blocks, indices of a random sample of at most ``most`` rows without padding.

        Args:
            places: how many samples each row holds.
        """
        rows = torch.arange(self.rows)
        most = max(1, most // places)
        if self.real is not None and self.real.numel() == self.rows:
            rows = rows[self.real.flatten().cpu()]
        if len(rows) > most:
            generator = torch.Generator().manual_seed(seed)
            rows = rows[torch.randperm(len(rows), generator=generator)[:most]]
        groups, features, outputs = self.product.matrix(self.weight).shape
        block = max(1, _BLOCK // (groups * (features + outputs)))
        yield from rows.to(self.given.device).split(block)

    def run(self) -> Tensor:
        """Compute the result, once."""
        if self.out is None:
            self.out = self.operator(*self.args)
        return self.out

    @property
    def without_bias(self) -> Tensor:
        """The result without the bias."""
        out, bias = self.run(), self.bias
        if bias is None:
            return out
        is_convolution = self.operator == torch.ops.aten.convolution.default
        return out - (bias.view(-1, *[1] * (out.dim() - 2)) if is_convolution else bias)

    def run_with(self, matrix: Tensor, shift: Tensor | None) -> None:
        """Compute the result with another weight, and a constant instead of the bias.

        Shape: matrix (groups, features, outputs), shift (groups, outputs).
        """
        weight = self.product.unmatrix(matrix).reshape(self.weight.shape).to(self.weight)
        args = list(self.args)
        args[self.product.weight] = weight.expand(args[self.product.weight].shape)
        if shift is None:
            self.out = self.operator(*args)
            return
        if self.product.bias is not None:
            args[self.product.bias] = shift.flatten().to(weight)
            self.out = self.operator(*args)
            return
        out = self.operator(*args)  # of matrices, since convolutions take a bias
        _, is_left = self.product.form
        by = (shift[..., None] if is_left else shift[:, None]).to(weight)
        self.out = (out + by).reshape(out.shape)


class _Abandoned(BaseException):
    """Raised in an abandoned forward, to end its thread."""


class Forward:
    """Run of a forward that pauses at each weight until it is resumed.

    The model's code runs in a separate thread, its operators in the thread that resumes it: else
    each forward would have separate memory and workers.

    Args:
        model: in eval mode.
        batch: its inputs.
        weights: of the model.
        note: is called with each other operator, its arguments and its result.
        readers: uses of the weights; see ``readers``.
        tape: records the forward, or says where it starts.

    Attributes:
        output: what the model returned, at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        weights: Weights,
        note: Callable[[OpOverload, tuple[Any, ...], Any], None] = lambda *_: None,
        readers: Mapping[View, Reader] = MappingProxyType({}),
        tape: Tape | None = None,
    ) -> None:
        self.output: Any = None
        self._tape = tape
        self._readers = {v: r for v, r in readers.items() if r.stream and r.calls == 1}
        self._uses = Counter(reader.stream for reader in self._readers.values())
        self._streams: dict[int, Tensor] = {}
        self._count = 0
        self._model, self._batch, self._weights, self._note = model, batch, weights, note
        self._real = real_places(batch)
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._read: Read | None = None
        self._job: Callable[[], Any] | None = None
        self._done: Any = None
        self._refused: Exception | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def advance(self) -> Read | None:
        """Resume until the next weight, and return its read; None at the end.

        Raises:
            Exception: what the forward raises.
        """
        self._read = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        while self._job is not None:
            with below_autograd():
                try:
                    self._done = self._job()
                except Exception as error:  # which the network's code may expect
                    self._refused = error
            self._job = None
            self._go.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._read

    def abandon(self) -> None:
        """End the forward without running the rest of it."""
        self._is_abandoned = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _work(self) -> None:
        try:
            with torch.no_grad(), _Stops(self):
                self.output = call(self._model, self._batch)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        self._stopped.release()

    def call(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and pause before one that multiplies with a weight."""
        if self._is_abandoned:
            raise _Abandoned
        self._count = number = self._count + 1
        tape = self._tape
        if tape is not None:
            if number < tape.start:
                return tape.result(number, operator)
            tape.check(args, kwargs)
        known = self._weights.name
        # Keywords are factors of the product and of what is added to it.
        product = None if kwargs else product_of(operator, args, lambda x: known(x) is not None)
        if product is None:
            result = self._asked(partial(operator, *args, **kwargs))
            self._note(operator, args, result)
        else:
            result = self._product(operator, args, product)
        if number in self._uses:
            self._streams[number] = result
        if tape is not None:
            tape.note(number, operator, args, kwargs, result)
        return result

    def _product(self, operator: OpOverload, args: tuple[Any, ...], product: Product) -> Any:
        view = self._weights.view(product.read(args), product.form)
        assert view is not None
        read = self._read = Read(view, operator, args, product, self._real, self._count)
        if (reader := self._readers.get(view)) is not None:
            read.stream = self._stream(reader.stream)
        self._asked(None)
        if read.out is None:
            read.out = self._asked(partial(operator, *args))
        return read.out

    def _asked(self, job: Callable[[], Any] | None) -> Any:
        """Pause; when the resuming thread has run the job, if there is one, return its result."""
        self._job = job
        self._stopped.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        done, self._done = self._done, None
        return done

    def _stream(self, number: int) -> Tensor | None:
        """Return the stored result of an operator, and drop it after its last use."""
        found = self._streams.get(number)
        self._uses[number] -= 1
        if not self._uses[number]:
            self._streams.pop(number, None)
        return found


class _Stops(TorchDispatchMode):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._forward.call(func, args, kwargs or {})


@contextmanager
def forwards(
    model: nn.Module, batches: Sequence[Any], weights: Weights, **known: Any
) -> Iterator[list[Forward]]:
    """Yield a forward of each batch; abandon unfinished ones at the end of the context.

    Args:
        **known: ``note`` and ``readers`` of ``Forward``.
    """
    started = [Forward(model, batch, weights, **known) for batch in batches]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it reads its weights in one operator
    try:
        yield started
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for forward in started:
            forward.abandon()


def fed_with(read: Read) -> list[Any]:
    """Return what a product multiplies a weight with; equal for equal inputs while they live."""
    own = (read.product.weight, read.product.bias)
    others = [arg for number, arg in enumerate(read.args) if number not in own]
    return [
        read.operator,
        read.product.form,
        *(
            (a.data_ptr(), a.shape, a.stride(), version_of(a)) if isinstance(a, Tensor) else a
            for a in others
        ),
    ]


def real_places(batch: Any) -> Tensor | None:
    """Return the mask of places that are no padding, from a batch's attention mask; or None.

    Shape: (examples, length), bool.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def along_reads(
    values: Tensor, view: View, matrix: Callable[[Tensor], Tensor], whole: Tensor
) -> Tensor:
    """Rearrange values for each element of a parameter as in the matrix that is read.

    Args:
        matrix: see ``Product``.

    Shape: (groups, features, outputs).
    """
    lies = torch.empty_strided(
        whole.shape, whole.stride(), dtype=values.dtype, device=whole.device
    ).copy_(values.to(whole.device).expand(whole.shape))
    return matrix(lies.as_strided(view.shape, view.strides, view.begin))


def places_of(read: Read, labels: Tensor) -> int:
    """Return the number of consecutive features per channel: those of a kernel or a flatten.

    Args:
        read: of the weight.
        labels: of the features, equal within a channel; if all are equal, a flatten is not
            recognised.

    Shape: labels (any number, features).
    """
    if read.operator == torch.ops.aten.convolution.default:
        return read.weight.shape[2:].numel()
    changes = (labels[:, 1:] != labels[:, :-1]).any(0).nonzero().flatten() + 1
    return math.gcd(*changes.tolist(), labels.shape[1]) if len(changes) else 1


@dataclass(slots=True)
class Reader:
    """Products of one forward that read the same elements of a weight as the same matrix.

    Attributes:
        name: of the weight.
        matrix: see ``Product``.
        calls: how often one forward multiplies with it.
        rows: number of rows that it multiplies in one forward, of all calls together.
        bias: elements of the bias that all of these products add and no others; None where there
            is none.
        stream: the number of the operator whose result is added to the product; 0 where no such
            result of the same shape is known.
        norm: names of the weight, bias, mean and variance of the BatchNorm that reads all of these
            products and no others, each empty where there is none; None without such a norm.
        added: elements of the vector that is added to all of these products and no others; or None.
        is_alone: no other products read some of its elements.
    """

    name: str
    matrix: Callable[[Tensor], Tensor]
    calls: int = 0
    rows: int = 0
    bias: View | None = None
    stream: int = 0
    norm: tuple[str, ...] | None = None
    added: View | None = None
    is_alone: bool = True

    @property
    def has_bias(self) -> bool:
        """Return whether a constant can be added to the product."""
        return any(each is not None for each in (self.bias, self.added, self.norm))
