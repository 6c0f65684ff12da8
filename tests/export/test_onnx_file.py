"""The ONNX file: models that torch's own exporter stumbles over."""

import torch
from deadness import close_some, randomise
from torch import nn

import l0prune


class Masked(nn.Module):
    """Attention with an added mask, heads first, its result viewed as rows again."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 5)
        self.bias = nn.Parameter(torch.randn(1, 3, 7, 7))

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return self.proj(x.transpose(1, 2).reshape(-1, 7, 12))


def test_where_the_exporter_fails_it_is_given_plain_strides(tmp_path, monkeypatch):
    x = torch.randn(2, 7, 12)
    model = l0prune.gate(randomise(Masked()).eval(), (x,), exclude="*.in")
    dense = l0prune.export(close_some(model))
    real, given = torch.onnx.export, []

    def stumbling(program, **options):
        given.append(program)
        if len(given) == 1:
            raise RuntimeError("Cannot view a tensor with these strides")
        return real(program, **options)

    monkeypatch.setattr(torch.onnx, "export", stumbling)
    dense.save_onnx(tmp_path / "model.onnx")
    _, second = ([str(node.target) for node in each.graph.nodes] for each in given)
    assert "aten.clone.default" in second
    assert "aten.view.default" not in second
    assert dense.certificate.worst("onnx", "float32") <= 1e-5
    assert any(check.what == "onnx" and check.batch == 5 for check in dense.certificate.checks)
