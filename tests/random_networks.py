"""Networks at random: branches, concats, residuals, shared layers, of every family at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from deadness import randomise
from dynamic_layers import Dynamic
from mixtures import Mixture
from torch import Tensor, nn
from torch.func import functional_call

import l0prune

Choose = Callable[[int], int]  # a number below the one given
Step = Callable[..., Tensor]  # from the values before and the step's own layers


class Values:
    """The values of one forward, each computed when it is first asked for."""

    def __init__(self, network: RandomNetwork, x: Tensor) -> None:
        self.network, self.known = network, {0: x}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self.known:
            _, run, layers = self.network.steps[number - 1]
            self.known[number] = run(self, *(self.network.layers[i] for i in layers))
        return self.known[number]


class RandomNetwork(nn.Module):
    """Steps that each make one more value from those before; some values are the outputs.

    With ``runs_all``, steps that no output needs are computed, too. It ``has_plain_costs`` unless
    values decide what is computed, or a step may be there for its state alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Step, list[int]]] = []
        self.outputs: list[int] = []
        self.runs_all = False
        self.has_plain_costs = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = Values(self, x)
        for number in range(1, len(self.steps) + 1) if self.runs_all else ():
            values[number]
        return tuple(values[number] for number in self.outputs)

    def __repr__(self) -> str:
        lines = [f"{number}: {text}" for number, (text, *_) in enumerate(self.steps, start=1)]
        said = f"outputs {self.outputs}, all steps run: {self.runs_all}"
        return "\n".join([*lines, said, repr(self.layers)])


class Running(nn.Module):
    """Subtracts from each channel a running mean, which every forward moves."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().movedim(1, -1).flatten(0, -2).mean(0)
        self.mean.mul_(0.5).add_(mean, alpha=0.5)
        return x - self.mean.view(-1, *[1] * (x.ndim - 2))


class Counting(nn.Module):
    """Scales by the number of forwards."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Author:
    """Writes a network step by step, with the values at hand, so that all shapes fit."""

    def __init__(self, choose: Choose, kinds: Sequence[str] | None = None) -> None:
        self.choose, self.kinds = choose, kinds or KINDS
        self.network = RandomNetwork()
        self.values = [torch.randn(2, (2, 3, 4)[choose(3)], 6, 6)]

    def write(self, steps: int) -> RandomNetwork:
        """A network of about so many steps, in eval mode."""
        self.add_layer()
        for _ in range(steps):
            getattr(self, f"add_{self.kinds[self.choose(len(self.kinds))]}")()
        for _ in range(1 + self.choose(2)):
            self.end()
        self.network.runs_all = bool(self.choose(2))
        return self.network.eval()

    # --- helpers ------------------------------------------------------------------------------

    def step(self, text: str, run: Step, *layers: nn.Module) -> int:
        mine = self.network.layers
        for layer in layers:
            if all(layer is not other for other in mine):
                mine.append(layer)
        numbers = [next(i for i, m in enumerate(mine) if m is layer) for layer in layers]
        self.network.steps.append((text, run, numbers))
        with torch.no_grad():
            self.values.append(run(self.values, *layers))
        return len(self.values) - 1

    def pick(self, rank: int | None = None, even: bool = False) -> int | None:
        """A value that may be worked on; the newest is chosen by 0."""
        fitting = [
            number
            for number, value in enumerate(self.values)
            if value.ndim == (rank or value.ndim) and not (even and value.shape[1] % 2)
        ]
        return fitting[-1 - self.mostly_small(len(fitting))] if fitting else None

    def mostly_small(self, size: int) -> int:
        """A number below ``size``, more often a small one: networks are deep, not only wide."""
        return self.choose(self.choose(self.choose(size) + 1) + 1)

    def pair(self) -> tuple[int, int] | None:
        """Two values of one shape."""
        a = self.pick()
        same = [n for n, v in enumerate(self.values) if v.shape == self.values[a].shape]
        return a, same[self.choose(len(same))]

    def width(self) -> int:
        return (2, 3, 4, 6, 8)[self.choose(5)]

    def apply(self, number: int, layer: nn.Module) -> int:
        name = type(layer).__name__
        return self.step(f"{name} of {number}", lambda v, m: m(v[number]), layer)

    def end(self) -> None:
        """One output: a value as it is, or what a last layer makes of it."""
        number = self.pick()
        if self.choose(4):
            size = self.values[number].shape[1]
            last = nn.Linear(size, 3) if self.values[number].ndim == 2 else nn.Conv2d(size, 3, 1)
            number = self.apply(number, last)
        self.network.outputs.append(number)

    # --- steps --------------------------------------------------------------------------------

    def add_layer(self) -> None:
        number = self.pick()
        size = self.values[number].shape[1]
        if self.values[number].ndim == 2:
            self.apply(number, nn.Linear(size, self.width(), bias=bool(self.choose(2))))
            return
        kind = self.choose(5)
        if kind == 1 and size % 2 == 0:
            layer: nn.Module = nn.Conv2d(size, 2 * self.width(), 3, padding=1, groups=2)
        elif kind == 2:
            multiplier = 1 + self.choose(2)
            layer = nn.Conv2d(size, size * multiplier, 3, padding=1, groups=size)
        elif kind == 3:
            layer = nn.ConvTranspose2d(size, self.width(), 3, padding=1)
        else:
            layer = nn.Conv2d(size, self.width(), 1 + 2 * self.choose(2), padding="same")
        self.apply(number, layer)

    def add_shared(self) -> None:
        """A layer once more, on another value that it takes."""
        convolutions = [layer for layer in self.network.layers if isinstance(layer, nn.Conv2d)]
        if not convolutions:
            return
        layer = convolutions[self.choose(len(convolutions))]
        fits = [
            number
            for number, value in enumerate(self.values)
            if value.ndim == 4 and value.shape[1] == layer.in_channels
        ]
        if fits:  # or what it takes is known inside of a step alone
            self.apply(fits[-1 - self.choose(len(fits))], layer)

    def add_activation(self) -> None:
        number = self.pick()
        size = self.values[number].shape[1]
        kinds = (nn.ReLU(), nn.Sigmoid(), nn.GELU(), nn.Hardswish(), nn.PReLU(size), nn.Tanh())
        self.apply(number, kinds[self.choose(len(kinds))])

    def add_norm(self) -> None:
        number = self.pick(rank=4)
        size = self.values[number].shape[1]
        kinds = [nn.BatchNorm2d(size), nn.GroupNorm(1, size)]
        kinds += [nn.GroupNorm(size // part, size) for part in (2, 3) if size % part == 0]
        if self.values[number][0, 0].numel() > 1:  # torch refuses single positions
            kinds.append(nn.InstanceNorm2d(size, affine=True))
        self.apply(number, kinds[self.choose(len(kinds))])

    def add_pool(self) -> None:
        number = self.pick(rank=4)
        if min(self.values[number].shape[2:]) >= 2:
            kinds = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Upsample(scale_factor=2))
            self.apply(number, kinds[self.choose(3)])

    def add_sum(self) -> None:
        a, b = self.pair()
        kinds = {"sum": torch.add, "product": torch.mul, "maximum": torch.maximum}
        name = list(kinds)[self.choose(3)]
        self.step(f"{name} of {a}, {b}", lambda v: kinds[name](v[a], v[b]))

    def add_residual(self) -> None:
        """A branch beside a value: a layer or two, what ends it, and the sum, also in place."""
        number = start = self.pick()
        size, width = self.values[start].shape[1], self.width()
        is_flat = self.values[start].ndim == 2

        def layer(inputs: int, outputs: int) -> nn.Module:
            has_bias = bool(self.choose(2))
            if is_flat:
                return nn.Linear(inputs, outputs, bias=has_bias)
            return nn.Conv2d(inputs, outputs, 3, padding=1, bias=has_bias)

        if self.choose(2):
            number = self.apply(number, layer(size, width))
            number = self.apply(number, (nn.ReLU(), nn.GELU(), nn.Sigmoid())[self.choose(3)])
            if not self.choose(3):  # a branch in the branch
                inner, kept = self.apply(number, layer(width, width)), number
                number = self.step(f"{kept} + {inner}", lambda v: v[kept] + v[inner])
            number = self.apply(number, layer(width, size))
        else:
            number = self.apply(number, layer(size, size))
        norm = nn.BatchNorm1d(size) if is_flat else nn.BatchNorm2d(size)
        ends = (None, norm, nn.Tanh(), nn.Hardtanh(), nn.PReLU(size))
        end = ends[self.choose(len(ends))]
        last = number if end is None else self.apply(number, end)
        how = self.choose(4)
        sums: tuple[Step, ...] = (
            lambda v: v[start] + v[last],
            lambda v: (v[last] * 1).add_(v[start]),
            lambda v: F.relu_(v[last] + v[start]),
            lambda v: torch.add(v[start], v[last], alpha=2),
        )
        self.step(f"branch {last} beside {start} ({how})", sums[how])

    def add_overwritten(self) -> None:
        """A layer on what another layer gives, which is then written over and not read again."""
        number = self.pick()
        size, width = self.values[number].shape[1], self.width()
        if self.values[number].ndim == 2:
            layers: tuple[nn.Module, ...] = nn.Linear(size, width), nn.Linear(width, size)
        else:
            layers = nn.Conv2d(size, width, 1), nn.Conv2d(width, size, 3, padding=1)

        def run(values: Values, first: nn.Module, second: nn.Module) -> Tensor:
            inner = first(values[number])
            result = second(inner)
            inner.mul_(2)
            return result

        last = self.step(f"two layers on {number}, the first written over", run, *layers)
        if self.choose(2):
            self.step(f"{number} + {last}", lambda v: v[number] + v[last])
        else:
            self.step(f"{last} beside {number}", lambda v: torch.cat([v[last], v[number]], 1))

    def add_concat(self) -> None:
        a = self.pick()
        shape = self.values[a].shape
        fits = [
            n
            for n, v in enumerate(self.values)
            if v.ndim == len(shape) and v.shape[2:] == shape[2:]
        ]
        b = fits[self.choose(len(fits))]
        if shape[1] + self.values[b].shape[1] <= 24:
            self.step(f"concat of {a}, {b}", lambda v: torch.cat([v[a], v[b]], 1))

    def add_beside(self) -> None:
        """One or two paths put beside a value, of which the second reads the first, too."""
        start = self.pick()
        is_flat = self.values[start].ndim == 2
        for _ in range(1 + self.choose(2)):
            size, width = self.values[start].shape[1], self.width()
            if size + width > 24:
                return
            layer = nn.Linear(size, width) if is_flat else nn.Conv2d(size, width, 3, padding=1)
            last = self.apply(start, layer)
            if self.choose(2):
                last = self.apply(last, (nn.ReLU(), nn.Sigmoid())[self.choose(2)])
            how, before = self.choose(2), start
            parts = (before, last) if how else (last, before)
            start = self.step(
                f"{parts[0]} beside {parts[1]}",
                lambda v, parts=parts: torch.cat([v[part] for part in parts], 1),
            )

    def add_glu(self) -> None:
        number = self.pick(even=True)
        if number is not None:
            self.step(f"GLU of {number}", lambda v: F.glu(v[number], 1))

    def add_slice(self) -> None:
        number = self.pick()
        size = self.values[number].shape[1]
        at = 1 + self.choose(max(size - 1, 1))
        kinds = (
            (f"first {at} of {number}", lambda v: v[number][:, :at]),
            (f"uneven split of {number}", lambda v: v[number].split([at, size - at], 1)[0]),
            (f"every other of {number}", lambda v: v[number][:, ::2]),
            (f"flip of {number}", lambda v: v[number].flip(1)),
            (f"roll of {number}", lambda v: v[number].roll(at, 1)),
        )
        self.step(*kinds[self.choose(len(kinds))])

    def add_order(self) -> None:
        """Channels in another order, some of them several times or not at all."""
        number = self.pick()
        size = self.values[number].shape[1]
        order = [self.choose(size) for _ in range(1 + self.choose(size))]
        if self.choose(2):
            order = torch.randperm(size).tolist()
        self.step(f"{order} of {number}", lambda v: v[number][:, order])

    def add_shuffle(self) -> None:
        number = self.pick(rank=4, even=True)
        if number is None:
            return
        _, c, h, w = self.values[number].shape

        def run(values: Values) -> Tensor:
            x = values[number].reshape(-1, 2, c // 2, h, w).transpose(1, 2)
            return x.reshape(-1, c, h, w)

        self.step(f"channel shuffle of {number}", run)

    def add_excite(self) -> None:
        number = self.pick(rank=4)
        size, hidden = self.values[number].shape[1], self.width()
        layers = nn.Linear(size, hidden), nn.Linear(hidden, size)

        def run(values: Values, down: nn.Module, up: nn.Module) -> Tensor:
            squeezed = up(F.relu(down(values[number].mean((2, 3)))))
            return values[number] * squeezed.sigmoid()[:, :, None, None]

        self.step(f"squeeze-excite of {number}", run, *layers)

    def add_dynamic(self) -> None:
        """A convolution whose kernels are mixed by the input."""
        number = self.pick(rank=4)
        inputs, outputs = self.values[number].shape[1], self.width()
        of = 2 + self.choose(3), bool(self.choose(2)), bool(self.choose(2))
        way = ("product", "einsum", "loop")[self.choose(3)]
        self.apply(number, Dynamic(inputs, outputs, *of, way))

    def add_mixture(self) -> None:
        """A mixture of experts over the channels, of which one may have been cut before."""
        number = self.pick()
        experts, x = 3 + self.choose(2), self.values[number].movedim(1, -1)
        way = ("list", "einsum", "bmm")[self.choose(3)]
        layer: nn.Module = Mixture(x.shape[-1], self.width(), experts, way)
        if self.choose(2):
            layer = l0prune.shrink_experts(layer, x, experts - 1, score="load").model
        self.step(
            f"mixture of {experts} experts or fewer on {number}",
            lambda v, m: m(v[number].movedim(1, -1)).movedim(-1, 1),
            layer,
        )

    def add_last(self) -> None:
        """Channels last, a Linear over them, and back."""
        number = self.pick(rank=4)
        self.step(
            f"Linear over the channels of {number}",
            lambda v, m: m(v[number].permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
            nn.Linear(self.values[number].shape[1], self.width()),
        )

    def add_flat(self) -> None:
        number = self.pick(rank=4)
        if self.values[number][0].numel() <= 300 and self.choose(2):
            self.step(f"flatten of {number}", lambda v: v[number].flatten(1))
        else:
            self.step(f"mean over positions of {number}", lambda v: v[number].mean((2, 3)))

    def add_attention(self) -> None:
        number = self.pick(rank=4)
        size, width = self.values[number].shape[1], 8
        shape = self.values[number].shape
        layers = (*(nn.Linear(size, width) for _ in range(3)), nn.Linear(width, size))

        def run(values: Values, *layers: nn.Module) -> Tensor:
            *projections, out = layers
            x = values[number].flatten(2).transpose(1, 2)
            heads = [layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in projections]
            y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            return out(y).transpose(1, 2).reshape(-1, *shape[1:])

        self.step(f"attention over the positions of {number}", run, *layers)

    def add_unread(self) -> None:
        """A value beside which another one is made that nobody reads."""
        number = self.pick()

        def written(x: Tensor) -> None:
            y = x.clone()
            y += x.tanh()
            y[:, :1].mul_(2)

        def noise(x: Tensor) -> None:
            F.dropout(x, 0.5, training=True).add_(torch.rand_like(x))

        def attention(x: Tensor) -> None:
            F.scaled_dot_product_attention(*[x.flatten(1)[:, None]] * 3)

        kinds = {"a write": written, "noise": noise, "attention": attention}
        name, network = list(kinds)[self.choose(len(kinds))], self.network

        def run(values: Values) -> Tensor:
            if network.runs_all:
                kinds[name](values[number])
            return values[number] * 2

        self.step(f"{name} on {number} that nobody reads, and its double", run)

    def add_tied(self) -> None:
        """A Linear over the channels whose weight is read twice, by several roads."""
        number = self.pick()
        layer = nn.Linear(self.values[number].shape[1], self.width())

        def fast(x: Tensor, m: nn.Module) -> Tensor:
            halves = {name: p * 0.5 for name, p in m.named_parameters()}
            return m(x) + functional_call(m, halves, (x,))

        kinds = {
            "back": lambda x, m: F.linear(m(x).relu(), m.weight.t()),
            "listed": lambda x, m: F.linear(m(x).relu(), next(iter(m.parameters())).t()),
            "fast weights": fast,
            "unit rows": lambda x, m: m(x).relu() @ (m.weight / m.weight.norm(dim=1)[:, None]),
            "Gram": lambda x, m: m(x).relu() / (m.weight @ m.weight.t()).abs().sum(1),
            "state": lambda x, m: F.linear(m(x).relu(), m.state_dict()["weight"].t()),
        }
        name = list(kinds)[self.choose(len(kinds))]
        self.step(
            f"{name} of one weight over the channels of {number}",
            lambda v, m: kinds[name](v[number].movedim(1, -1), m).movedim(-1, 1),
            layer,
        )

    def add_state(self) -> None:
        """A running mean of each channel, or a count, that every forward updates."""
        number = self.pick()
        kind = (Running, Counting)[self.choose(2)]
        self.network.has_plain_costs = False
        self.apply(number, kind(self.values[number].shape[1]))

    def add_condition(self) -> None:
        """One of two layers over the channels, as a value of the input has it."""
        number = self.pick()
        size, width = self.values[number].shape[1], self.width()
        layers = nn.Linear(size, width), nn.Linear(size, width)

        def run(values: Values, first: nn.Module, second: nn.Module) -> Tensor:
            x = values[number].movedim(1, -1)
            chosen = torch.cond(
                values[0].sum() > 0, lambda t: first(t).relu(), lambda t: second(t).tanh(), (x,)
            )
            return chosen.movedim(-1, 1)

        self.network.has_plain_costs = False
        self.step(f"one of two layers over the channels of {number}", run, *layers)

    def add_boolean(self) -> None:
        """A Linear on those positions alone that a mask of the input chooses."""
        number = self.pick(rank=4)
        size, shape = self.values[number].shape[1], self.values[number].shape
        if shape[2:].numel() > self.values[0][0].numel():
            return
        by_index = bool(self.choose(2))

        def run(values: Values, layer: nn.Module) -> Tensor:
            tokens = values[number].flatten(2).transpose(1, 2)
            mask = values[0].flatten(1)[:, : tokens.shape[1]] > 0
            out = torch.zeros_like(tokens)
            if by_index:
                rows, columns = mask.nonzero(as_tuple=True)
                out = out.index_put((rows, columns), layer(tokens[rows, columns]))
            else:
                out[mask] = layer(tokens[mask])
            return out.transpose(1, 2).unflatten(2, shape[2:])

        self.network.has_plain_costs = False
        self.step(f"a Linear on some positions of {number}", run, nn.Linear(size, size))

    def add_resized(self) -> None:
        """One layer called on a value at two sizes."""
        number = self.pick(rank=4)
        size, shape = self.values[number].shape[1], self.values[number].shape
        if min(shape[2:]) < 2:
            return
        layer = nn.Conv2d(size, self.width(), 3, padding=1)

        def run(values: Values, m: nn.Module) -> Tensor:
            small = m(F.avg_pool2d(values[number], 2))
            return m(values[number]) + F.interpolate(small, shape[2:])

        self.step(f"one layer on {number} at two sizes", run, layer)

    def add_recurrent(self) -> None:
        """A recurrent layer over the positions: stacked, in two directions, or projected."""
        number = self.pick(rank=4)
        shape = self.values[number].shape
        kind = (nn.LSTM, nn.GRU, nn.RNN)[self.choose(3)]
        settings = {"num_layers": 1 + self.choose(2), "bidirectional": not self.choose(3)}
        if kind is nn.LSTM and not self.choose(3):
            settings["proj_size"] = 2
        layer = kind(
            shape[1], 3 + self.choose(4), batch_first=True, bias=bool(self.choose(2)), **settings
        )
        if self.choose(2):
            self.step(
                f"{kind.__name__} over the positions of {number}",
                lambda v, m: (
                    m(v[number].flatten(2).transpose(1, 2))[0]
                    .transpose(1, 2)
                    .unflatten(2, shape[2:])
                ),
                layer,
            )
            return

        def last(values: Values, layer: nn.Module) -> Tensor:
            _, state = layer(values[number].flatten(2).transpose(1, 2))
            return (state[0] if kind is nn.LSTM else state)[-1]

        self.step(f"last state of a {kind.__name__} over the positions of {number}", last, layer)

    def add_selection(self) -> None:
        """Positions that values of the input choose, the same ones for all channels."""
        number = self.pick(rank=4)
        shape = self.values[number].shape
        count = shape[2:].numel()
        if count > self.values[0][0].numel():
            return

        def spliced(x: Tensor, index: Tensor) -> Tensor:
            tokens = x.transpose(1, 2)
            mask = (index[:, :1] % 2 == 0).transpose(1, 2).expand_as(tokens)
            return tokens.masked_scatter(mask, tokens.tanh()).transpose(1, 2)

        kinds = {
            "gather": lambda x, index: x.gather(2, index),
            "scatter": lambda x, index: torch.zeros_like(x).scatter(2, index, x),
            "scatter_add": lambda x, index: x.scatter_add(2, index // 2, x),
            "splice": spliced,
        }
        name = list(kinds)[self.choose(len(kinds))]

        def run(values: Values) -> Tensor:
            x = values[number].flatten(2)
            index = values[0].flatten(1)[:, :count].argsort(1)
            return kinds[name](x, index[:, None].expand(-1, x.shape[1], -1)).unflatten(2, shape[2:])

        self.step(f"{name} of positions of {number}", run)

    def add_softmax(self) -> None:
        number = self.pick()
        self.step(f"softmax over the channels of {number}", lambda v: v[number].softmax(1))

    def add_average(self) -> None:
        """Something over the channels that zeros do not change, but for a divisor."""
        number = self.pick()
        size = self.values[number].shape[1]

        def rms_by_hand(x: Tensor, weight: Tensor) -> Tensor:
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2))

        def layer_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
            variance = x.var(-1, keepdim=True, correction=0)
            return weight * (x - x.mean(-1, keepdim=True)) / (variance + 1e-2).sqrt()

        kinds = {
            "mean": lambda x, m: x * x.mean(-1, keepdim=True),
            "LayerNorm by hand": lambda x, m: layer_norm_by_hand(x, m.weight),
            "mean of all": lambda x, m: x * x.mean(),
            "RMSNorm": lambda x, m: F.rms_norm(x, (size,), m.weight, 1e-2),
            "RMSNorm by hand": lambda x, m: rms_by_hand(x, m.weight),
            "length": lambda x, m: F.normalize(x, dim=-1, eps=1e-3),
        }
        name = list(kinds)[self.choose(len(kinds))]
        self.step(
            f"{name} over the channels of {number}",
            lambda v, m: kinds[name](v[number].movedim(1, -1), m).movedim(-1, 1),
            nn.RMSNorm(size),
        )


ALL_KINDS = [name.removeprefix("add_") for name in vars(Author) if name.startswith("add_")]
ALL_KINDS += ["layer"] * 5 + ["norm", "activation", "sum", "concat", "residual"]
# torch compiles a condition whenever it runs, which takes long: left to the slow tests.
KINDS = [name for name in ALL_KINDS if name != "condition"]


def written(choose, steps, kinds=None):
    """A network in float64 of so many steps, each as ``choose`` has it, and inputs for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            author = Author(choose, kinds)
            network = author.write(steps)
        finally:
            torch.set_default_dtype(torch.float32)
    return randomise(network), author.values[0]
