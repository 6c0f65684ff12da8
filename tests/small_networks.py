"""Small networks on which pruners go wrong: a crash, or channels cut that do not belong together.

Each is a function that makes a module and its example inputs; ``AXES`` has the sizes of the axes
that should be found, in any order. Those of ``networks`` are taken from there. Everything that is
cut here must be cut exactly; ``benchmarks.torch_pruning --zoo small`` shows what another tool does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import networks
import torch
import torch.nn.functional as F
from models import Tied
from networks import FLAT, IMAGE, STEPS, TOKENS, Fn, conv
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

Example = tuple[Tensor, ...]
Make = Callable[[], tuple[nn.Module, Example]]
CASES: dict[str, Make] = {}
AXES: dict[str, list[int]] = {}
REASONS: dict[str, str] = {}  # of those in which nothing can be cut


def case(
    *axes: int, shape: tuple[int, ...] = IMAGE, why: str = ""
) -> Callable[[Callable], Callable]:
    """Put a function that makes a module into the tables."""

    def keep(make: Callable) -> Callable:
        CASES[make.__name__] = lambda: (make(), (torch.randn(shape),))
        AXES[make.__name__] = list(axes)
        if why:
            REASONS[make.__name__] = why
        return make

    return keep


def _known(name: str) -> tuple[nn.Module, Example]:
    module, shape, _ = networks.CASES[name]
    return copy.deepcopy(module), (torch.randn(shape),)


# Which axes are found in these is tested in test_rules.
for _name in (
    "hard_coded_view",
    "nhwc_flatten",
    "concat_with_image",
    "channel_shuffle",
    "pixel_shuffle",
    "depth_multiplier",
    "raw_parameters",
    "scale_buffer",
    "maxout",
    "glu",
    "uneven_split",
    "weight_norm",
    "weight_norm_inside",
    "weight_read_both_ways",
    "fused_by_hand",
    "multi_head_attention",
    "queries_with_positions",
    "pieces_of_weights",
    "by_letters",
    "messages_of_a_graph",
    "spectral_norm_by_hand",
    "encoder_layer",
    "grouped_query",
    "recurrent",
):
    CASES[_name] = partial(_known, _name)


@case(8, 8)
def residual_from_the_image():
    """The image's three channels run through; only the branch has something to cut."""
    forward = lambda m, x: m.d(x + m.b(F.relu(m.a(x)))).relu().mean((2, 3)) @ m.e  # noqa: E731
    e = nn.Parameter(torch.randn(8, 2))
    return Fn(forward, a=conv(3, 8), b=conv(8, 3), d=conv(3, 8), e=e)


@case(5, 5)
def first_half_of_the_channels():
    """Half is read twice, half once: two axes, and the code says where the half ends."""
    return Fn(
        lambda m, x: m.b((y := m.a(x))[:, :5]) + m.c(y), a=conv(3, 10), b=conv(5, 2), c=conv(10, 2)
    )


@case(5)
def gate_by_chunk():
    forward = lambda m, x: m.b((y := m.a(x).chunk(2, 1))[0] * y[1].sigmoid())  # noqa: E731
    return Fn(forward, a=conv(3, 10), b=conv(5, 2))


@case(4, 8, 32, shape=TOKENS)
def fused_qkv_with_hard_coded_shapes():
    def forward(m, x):
        q, k, v = m.qkv(x).reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return m.o((a @ v).transpose(1, 2).reshape(2, 5, 32))

    return Fn(forward, qkv=nn.Linear(32, 96), o=nn.Linear(32, 7))


@case(8, 6)
def patch_merging():
    """Swin's: four neighbours side by side, so that each channel is read at four places."""

    def forward(m, x):
        x = m.a(x).permute(0, 2, 3, 1)
        parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return m.c(F.relu(m.b(torch.cat(parts, -1)))).mean((1, 2))

    return Fn(forward, a=conv(3, 8), b=nn.Linear(32, 6), c=nn.Linear(6, 2))


@case(4, 8)
def patch_merging_with_norm():
    """A LayerNorm over the merged channels: each goes from all four patches, or stays."""

    def forward(m, x):
        x = m.a(x).permute(0, 2, 3, 1)
        parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return m.c(F.relu(m.b(m.n(torch.cat(parts, -1))))).mean((1, 2))

    return Fn(forward, a=conv(3, 4), n=nn.LayerNorm(16), b=nn.Linear(16, 8), c=nn.Linear(8, 2))


@case(4)
def flipped_over_channels():
    """Channel i is added to channel 7-i: the two go together."""
    return Fn(lambda m, x: m.b((y := m.a(x)) + y.flip(1)), a=conv(3, 8), b=conv(8, 2))


@case(why="tied to every other one of its axis")
def rolled_over_channels():
    """Every channel is coupled to its neighbour, so to all: nothing can go alone."""
    return Fn(lambda m, x: m.b((y := m.a(x)) + y.roll(1, 1)), a=conv(3, 8), b=conv(8, 2))


@case(16, 32, shape=TOKENS)
def triangle_over_features():
    """Which features a token keeps depends on where they stand; the rest goes past it."""
    forward = lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x)).tril())))  # noqa: E731
    return Fn(forward, a=nn.Linear(32, 12), b=nn.Linear(12, 16), c=nn.Linear(16, 2))


@case(8, 6, 8, 32, shape=STEPS)
def lstm():
    """Unit j is four rows of its weights, a column of one of them, and a column of the reader."""
    forward = lambda m, x: m.c(F.relu(m.b(m.r(m.a(x))[0][:, -1])))  # noqa: E731
    return Fn(
        forward,
        a=nn.Linear(32, 8),
        r=nn.LSTM(8, 6, batch_first=True),
        b=nn.Linear(6, 8),
        c=nn.Linear(8, 3),
    )


@case(8, 6, 8, 32, shape=STEPS)
def gru_both_ways():
    """Torch has one size for both directions: unit j goes from both."""
    forward = lambda m, x: m.c(F.relu(m.b(m.r(m.a(x))[0].mean(1))))  # noqa: E731
    return Fn(
        forward,
        a=nn.Linear(32, 8),
        r=nn.GRU(8, 6, batch_first=True, bidirectional=True),
        b=nn.Linear(12, 8),
        c=nn.Linear(8, 3),
    )


@case(8, 6, 4, 32, shape=STEPS)
def lstm_with_projections():
    """What it gives out and reads of itself is smaller than its cells."""
    forward = lambda m, x: m.b(m.r(m.a(x))[0])  # noqa: E731
    lstm = nn.LSTM(8, 6, 2, batch_first=True, proj_size=4, bias=False)
    return Fn(forward, a=nn.Linear(32, 8), r=lstm, b=nn.Linear(4, 3))


@case(6, 5, 8, shape=STEPS)
def voice_encoder():
    """LSTMs on LSTMs, one of them of three layers; only the last state is read."""

    def forward(m, x):
        y, _ = m.second(m.first(x)[0])
        _, (state, _) = m.third(y)
        return F.normalize(m.embed(state[-1]).relu(), dim=1)

    layers = {"first": nn.LSTM(32, 6, batch_first=True), "second": nn.LSTM(6, 5, batch_first=True)}
    third = nn.LSTM(5, 8, 3, batch_first=True)
    return Fn(forward, **layers, third=third, embed=nn.Linear(8, 4))


@case(8, 6, 7, 32, shape=STEPS)
def cells_in_a_loop():
    """What a cell gives out comes back to it; where no state is given, torch makes one of zeros."""

    def forward(m, x):
        x, state, h = m.a(x), None, x.new_zeros(len(x), 7)
        for t in range(x.shape[1]):
            state = m.lstm(x[:, t], state)
            h = m.gru(state[0].relu(), h)
        return m.b(h) + m.c(state[1])

    cells = {"lstm": nn.LSTMCell(8, 6), "gru": nn.GRUCell(6, 7)}
    return Fn(forward, a=nn.Linear(32, 8), **cells, b=nn.Linear(7, 3), c=nn.Linear(6, 3))


@case(6, 4, shape=STEPS)
def states_from_the_encoder():
    """The decoder begins where the encoder ended, so their units are the same ones."""

    def forward(m, x):
        _, state = m.encoder(x)
        x, out = x.flip(1), []
        for t in range(3):
            step, state = m.decoder(m.embed(x[:, t : t + 1]), state)
            out.append(m.b(step))
        return torch.cat(out, 1)

    layers = {"encoder": nn.LSTM(32, 6, 2, batch_first=True)}
    layers["decoder"] = nn.LSTM(4, 6, 2, batch_first=True)
    return Fn(forward, **layers, embed=nn.Linear(32, 4), b=nn.Linear(6, 3))


@case(6, shape=STEPS)
def attention_over_states():
    """Nothing weighs the sum over units: they are zero where the rows of their weights are."""

    def forward(m, x):
        y, state = m.r(x)
        weights = (y @ state[-1][:, :, None]).softmax(1)
        return m.b((weights * y).sum(1))

    return Fn(forward, r=nn.GRU(32, 6, batch_first=True), b=nn.Linear(6, 3))


@case(8, 8)
def dict_output():
    def forward(m, x):
        x = F.relu(m.a(x))
        return {"mask": m.b(x), "label": m.c(F.relu(m.d(x)).mean((2, 3)))}

    return Fn(forward, a=conv(3, 8), b=conv(8, 2), d=conv(8, 8), c=nn.Linear(8, 3))


@dataclass
class Answer:
    mask: Tensor
    label: Tensor


torch.export.register_dataclass(Answer, serialized_type_name="tests.Answer")


@case(8, 8)
def dataclass_output():
    def forward(m, x):
        x = F.relu(m.a(x))
        return Answer(m.b(x), m.c(F.relu(m.d(x)).mean((2, 3))))

    return Fn(forward, a=conv(3, 8), b=conv(8, 2), d=conv(8, 8), c=nn.Linear(8, 3))


@case(8)
def nested_tuple_output():
    return Fn(
        lambda m, x: ((y := F.relu(m.a(x))).sum(1), [m.b(y), (m.c(y),)]),
        a=conv(3, 8),
        b=conv(8, 2),
        c=conv(8, 3),
    )


@case(12)
def silent_channels_with_a_bias():
    """Convolutions that are all zero, yet BatchNorm's bias makes their channels a constant."""
    first, norm = conv(3, 12, bias=False), nn.BatchNorm2d(12)
    with torch.no_grad():
        first.weight[::2] = 0
        norm.bias.fill_(0.5)
    return nn.Sequential(first, norm, nn.ReLU(), conv(12, 2))


@case(12)
def tied_embedding():
    return Tied()


CASES["tied_embedding"] = lambda: (tied_embedding(), (torch.randint(0, 20, (2, 5)),))


@case(8)
def tied_convolutions():
    """One weight in two layers, one after the other: their inputs and outputs are one axis."""
    model = Fn(
        lambda m, x: m.d(F.relu(m.c(F.relu(m.b(F.relu(m.a(x))))))),
        a=conv(3, 8),
        b=conv(8, 8),
        c=conv(8, 8),
        d=conv(8, 2),
    )
    model.c.weight = model.b.weight
    return model


@case(8, 6)
def frozen_first_layers():
    model = nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)
    )
    model[:2].requires_grad_(False)
    return model


@case(4, 6)
def group_norm():
    """Statistics over a group's channels: whole groups go. Of its reader single channels can."""
    return nn.Sequential(
        conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), conv(8, 6), nn.ReLU(), conv(6, 2)
    )


@case(8)
def instance_norm():
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), conv(8, 2))


@case(why="a softmax or running sum goes over it")
def softmax_over_channels():
    return nn.Sequential(conv(3, 8), nn.Softmax(1), conv(8, 2))


@case(why="a softmax or running sum goes over it")
def cumulative_sum_over_channels():
    return Fn(lambda m, x: m.b(m.a(x).cumsum(1)), a=conv(3, 8), b=conv(8, 2))


@case(8)
def mean_over_channels():
    """The mean divides by the number of channels, the cut ones included."""
    return Fn(lambda m, x: m.b(F.relu(m.a(x)).mean(1, keepdim=True)), a=conv(3, 8), b=conv(1, 2))


@case(4)
def pixel_unshuffle_after():
    return nn.Sequential(conv(3, 4), nn.ReLU(), nn.PixelUnshuffle(2), conv(16, 2))


@case(8, 32)
def unfolded_patches():
    return Fn(
        lambda m, x: m.b(F.unfold(m.a(x), 2).transpose(1, 2)), a=conv(3, 8), b=nn.Linear(32, 3)
    )


@case(4)
def every_channel_repeated():
    return Fn(lambda m, x: m.b(m.a(x).repeat_interleave(3, 1)), a=conv(3, 4), b=conv(12, 2))


@case(4)
def all_channels_tiled():
    return Fn(lambda m, x: m.b(m.a(x).repeat(1, 3, 1, 1)), a=conv(3, 4), b=conv(12, 2))


@case(5)
def stacked_branches():
    """Two branches side by side in every channel: channel i of both is one."""
    forward = lambda m, x: m.c(torch.stack([m.a(x), m.b(x)], 2).flatten(1, 2))  # noqa: E731
    return Fn(forward, a=conv(3, 5), b=conv(3, 5), c=conv(10, 2))


@case(7, 10, shape=FLAT)
def chosen_by_index():
    """Neurons picked by a list of positions, one of them twice, one never."""
    index = torch.tensor([0, 3, 3, 5, 1, 6, 2])
    return Fn(
        lambda m, x: m.b(torch.tanh(m.a(x))[:, m.i]), a=nn.Linear(10, 7), b=nn.Linear(7, 3), i=index
    )


@case(8, 8, 10, 10, shape=FLAT)
def bilinear():
    """Both of what it multiplies can be cut."""
    forward = lambda m, x: m.c(m.a(x).tanh(), m.b(x).tanh())  # noqa: E731
    return Fn(forward, a=nn.Linear(10, 8), b=nn.Linear(10, 8), c=nn.Bilinear(8, 8, 3))


@case(8, 10, shape=FLAT)
def spectral_normed_reader():
    """The norm is of the whole weight, whose gates close what is cut of it, too."""
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), spectral_norm(nn.Linear(8, 3)))


@case(8)
def weight_normed_convolution():
    return nn.Sequential(weight_norm(conv(3, 8)), nn.ReLU(), conv(8, 2))


@case(6, 8)
def weight_standardised():
    """Each filter less its own mean, which is over all inputs, those that went included."""

    def forward(m, x):
        w = m.b.weight - m.b.weight.mean((1, 2, 3), keepdim=True)
        return m.c(F.relu(F.conv2d(F.relu(m.a(x)), w, m.b.bias, padding=1)))

    return Fn(forward, a=conv(3, 8), b=conv(8, 6), c=conv(6, 2))


class Remembering(nn.Module):
    """A module that remembers its width and reshapes by it."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.a, self.b = conv(3, width), conv(width, 2)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.b(self.a(x) * self.scale.view(1, self.width, 1, 1))


@case(8)
def squeeze_by_attributes():
    return Remembering(8)


@case(3, 4, 6)
def grouped_between_dense():
    return nn.Sequential(conv(3, 12), nn.ReLU(), conv(12, 18, groups=3), nn.ReLU(), conv(18, 2))


@case(8)
def transposed_depthwise():
    return nn.Sequential(conv(3, 8), nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8), conv(8, 2))


def under_a_kernel(size):
    def forward(m, x):
        y = torch.stack([m.norm(m.a(x)), m.norm(m.b(x))], 1)
        return m.head(m.mix(y).squeeze(1))

    layers = {"a": nn.Linear(10, 8), "b": nn.Linear(10, 8), "head": nn.Linear(8, 3)}
    mix = nn.Conv1d(2, 1, size, padding=size // 2)
    return Fn(forward, mix=mix, norm=nn.LayerNorm(8), **layers)


@case(8, 10, 10, shape=FLAT)
def features_under_a_kernel_of_one():
    """What a Linear wrote is what a convolution goes along, as CoaT's last one does."""
    return under_a_kernel(1)


@case(10, 10, shape=FLAT)
def features_under_a_sliding_window():
    """The same with a kernel that reaches the neighbours: these are whole."""
    return under_a_kernel(3)


class Clipped(nn.Module):
    """A Linear between two clamps, whose limits are buffers."""

    def __init__(self, inputs, outputs, limit):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        for name, value in {"low": -limit, "high": limit}.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x):
        x = self.linear(torch.clamp(x, self.low, self.high))
        return torch.clamp(x, self.low, self.high)


@case(8, 8, 10, shape=FLAT)
def clamps_of_one_tensor():
    """torch's ONNX optimizer mixes up their limits, and the file is no longer one."""

    def forward(m, x):
        x = m.a(x) * 2
        return m.c(m.b1(x) * m.b2(x) + m.b3(x))

    branches = {f"b{n}": Clipped(8, 8, 0.7 + n / 10) for n in (1, 2, 3)}
    return Fn(forward, a=nn.Linear(10, 8), c=nn.Linear(8, 3), **branches)
