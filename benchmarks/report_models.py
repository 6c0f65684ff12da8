"""The networks of ``benchmarks.reports``: small, with random weights.

pip install ".[benchmarks]"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import l0prune
from benchmarks.thread_models import Built, images, language, tokens

WORDS = 60
TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def _made(model: str, config: str, **settings: Any) -> Any:
    """A model of transformers by the names of its classes, with weights of some size."""
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return made


def llava(folder: Path) -> Built:
    """Images and text: a small CLIP, a projector and a small Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig

    sees = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=24,
    )  # fmt: skip
    reads = LlamaConfig(
        **TEXT, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, head_dim=8
    )
    model = _made(
        "LlavaForConditionalGeneration", "LlavaConfig", vision_config=sees, text_config=reads,
        image_token_id=WORDS - 1, image_seq_length=4,
    )  # fmt: skip
    ids = torch.tensor([[2, *[WORDS - 1] * 4, 5, 9, 7]] * 2)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    return model, ((), inputs | {"attention_mask": torch.ones_like(ids)})


class Loudness(nn.Module):
    """Frames of sound over their running level, which a buffer keeps from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 24, 3, padding=1), nn.Conv1d(24, 3, 1)
        self.register_buffer("level", torch.ones(1, 24, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        self.level.mul_(0.9).add_(0.1 * x.mean((0, 2), keepdim=True))
        return self.out(x / (self.level + 0.1))


class Frames(nn.Module):
    """The last two frames are kept for the next call; then a GRU over those of this call."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = nn.Conv1d(4, 16, 1), nn.Conv1d(16, 24, 3)
        self.gru, self.out = nn.GRU(24, 16, batch_first=True), nn.Linear(16, 3)
        self.register_buffer("past", torch.zeros(1, 16, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.past, torch.relu(self.into(x))], 2)
        self.past.copy_(x[:, :, -2:])
        x, _ = self.gru(torch.relu(self.conv(x)).mT)
        return self.out(x)


def loudness(folder: Path) -> Built:
    return Loudness(), images(1, 4, 10)


def frames(folder: Path) -> Built:
    return Frames(), images(1, 4, 10)


class Edges(nn.Module):
    """Graph attention over given edges: four heads, joined or averaged."""

    def __init__(self, ins: int, size: int, is_joined: bool) -> None:
        super().__init__()
        self.heads, self.size, self.is_joined = 4, size, is_joined
        self.values = nn.Linear(ins, 4 * size, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(4, size) / 4) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x, (of, to) = self.values(x).view(len(x), self.heads, self.size), edges
        each = F.leaky_relu((x * self.source).sum(-1)[of] + (x * self.target).sum(-1)[to], 0.2)
        each = each.exp()
        every = torch.zeros_like(x[..., 0]).index_add(0, to, each)
        x = torch.zeros_like(x).index_add(0, to, (each / (every[to] + 1e-9))[..., None] * x[of])
        return x.flatten(1) if self.is_joined else x.mean(1)


class GraphAttention(nn.Module):
    """Two layers of attention over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Edges(10, 8, True), Edges(32, 5, False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.last(F.elu(self.first(x, edges)), edges)


def graph_attention(folder: Path) -> Built:
    return GraphAttention(), ((torch.randn(12, 10), torch.randint(0, 12, (2, 40))), {})


def deepseek(folder: Path) -> Built:
    """Latent attention, of two ranks."""
    model = _made(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **TEXT, num_key_value_heads=4,
        num_hidden_layers=2, intermediate_size=40, first_k_dense_replace=2, q_lora_rank=16,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
    )  # fmt: skip
    return model, tokens(10, WORDS)


def nemotron(folder: Path) -> Built:
    """A Mamba in groups, an attention and a mixture of experts."""
    model = _made(
        "NemotronHForCausalLM", "NemotronHConfig", **TEXT, num_key_value_heads=2, head_dim=8,
        layers_block_type=["mamba", "attention", "moe"], intermediate_size=40, mamba_num_heads=4,
        mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=24,
        n_group=1, topk_group=1,
    )  # fmt: skip
    model.set_experts_implementation("batched_mm")
    return model, tokens(10, WORDS)


def minimax(folder: Path) -> Built:
    """Eight experts, and a bias that corrects their scores beside the router."""
    model = _made(
        "MiniMaxM2ForCausalLM", "MiniMaxM2Config", **TEXT, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=2, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return _corrected(model), tokens(10, WORDS)


def grouped_experts(folder: Path) -> Built:
    """Sixteen experts in four groups, of which the router chooses two first."""
    model = _made(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **TEXT, num_key_value_heads=4,
        num_hidden_layers=2, intermediate_size=40, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=4,
        n_routed_experts=16, topk_group=2, num_experts_per_tok=4, moe_intermediate_size=16,
    )  # fmt: skip
    return _corrected(model), tokens(10, WORDS)


def _corrected(model: nn.Module) -> nn.Module:
    for name, buffer in model.named_buffers():
        if "correction" in name:
            nn.init.normal_(buffer, std=0.1)
    return model


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "head_dim": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": WORDS}


def llama(folder: Path) -> Built:
    return language("llama", **SIZES)


def vit(folder: Path) -> Built:
    """A ViT of transformers for images of 16."""
    model = _made(
        "ViTForImageClassification", "ViTConfig", hidden_size=64, num_hidden_layers=2,
        num_attention_heads=8, intermediate_size=96, image_size=16, patch_size=4, num_labels=3,
    )  # fmt: skip
    return model, ((), {"pixel_values": torch.randn(2, 3, 16, 16)})


def frozen_half(folder: Path) -> Built:
    """Convolutions with their norms, as a trainer's checkpoint has them."""
    sizes = (3, 16, 32, 32)
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU())
        for i, o in pairwise(sizes)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    model = nn.Sequential(*blocks, *head).half().requires_grad_(False)
    return model, ((torch.randn(2, 3, 8, 8).half(),), {})


def tied_table(folder: Path) -> Built:
    """A file whose head reads its table of words, transposed."""
    text = """net (int64[n, 7] ids) => (float[n, 7, 40] y) {
        e = Gather(table, ids)
        u = MatMul(e, up)
        r = Relu(u)
        d = MatMul(r, down)
        z = Add(d, e)
        head = Transpose<perm = [1, 0]>(table)
        y = MatMul(z, head)
    }"""
    return _read(folder, text, _drawn(table=(40, 24), up=(24, 48), down=(48, 24)))


def constant_if(folder: Path) -> Built:
    """A file with weights in the branches of an If whose condition is the rank of its input."""
    branch = "() => (o) { u = MatMul(h, up) r = Relu(u) o = MatMul(r, down) }"
    text = f"""net (float[n, 8] x) => (float[n, 5] y) {{
        m = MatMul(x, w)
        h = Relu(m)
        s = Shape(x)
        rank = Size(s)
        two = Constant<value = int64 {{2}}>()
        c = Equal(rank, two)
        y = If(c) <then_branch = a {branch}, else_branch = b {branch}>
    }}"""
    branches = [_drawn(up=(12, 16), down=(16, 5)) for _ in range(2)]
    return _read(folder, text, _drawn(w=(8, 12)), branches)


def _drawn(**sizes: tuple[int, int]) -> list[Any]:
    """Weights of a graph by name."""
    from onnx import numpy_helper

    arrays = {name: (torch.randn(size) / size[0] ** 0.5).numpy() for name, size in sizes.items()}
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def _read(folder: Path, text: str, weights: list[Any], branches: Sequence[list[Any]] = ()) -> Built:
    """Write a file of a graph in ONNX's own language, and read it as a network."""
    import onnx

    file = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')
    graphs = [part.g for part in file.graph.node[-1].attribute if part.HasField("g")]
    for graph, of in zip((file.graph, *graphs), (weights, *branches), strict=True):
        graph.initializer.extend(of)
    onnx.save(file, folder / "net.onnx")
    model: Any = l0prune.load_model(str(folder / "net.onnx"))
    return model, (model.example_input_array, {})


Build = Callable[[Path], Built]
