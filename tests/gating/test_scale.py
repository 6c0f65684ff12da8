import pytest
import torch

from l0prune.gating.gated_layer import scale

SHAPES = [((5,), 0), ((4, 6), 0), ((4, 6), 1), ((4, 6, 3, 3), 0), ((4, 6, 3, 3), 1)]
SHAPES += [((4, 6, 1, 1), 1), ((4, 6, 3), 2), ((2, 3, 4, 5), 2), ((3, 1), 1)]


def naive(tensor: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor:
    return (tensor.movedim(dim, -1) * values).movedim(-1, dim)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_scale_multiplies_along_one_dim(shape, dim, memory):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, dtype=torch.float64, generator=generator)
    if len(shape) == 4:
        tensor = tensor.contiguous(memory_format=memory)
    values = torch.rand(shape[dim], dtype=torch.float64, generator=generator)
    seed = torch.randn(shape, dtype=torch.float64, generator=generator)
    inputs = (tensor.requires_grad_(), values.requires_grad_())
    result, wanted = scale(*inputs, dim), naive(*inputs, dim)
    assert torch.equal(result, wanted)
    assert result.stride() == tensor.stride()
    got = torch.autograd.grad((result * seed).sum(), inputs)
    for ours, theirs in zip(got, torch.autograd.grad((wanted * seed).sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_scale_can_be_differentiated_twice():
    tensor = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    values = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t, v: scale(t, v, 1), (tensor, values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_a_low_precision_tensor_get_their_gradient_in_float32(dtype):
    tensor = torch.full((1000, 2), 1.5, dtype=dtype, requires_grad=True)
    values = torch.tensor([1 / 3, 1.0], requires_grad=True)
    result = scale(tensor, values, 1)
    assert result.dtype == dtype
    assert torch.equal(result[0], (1.5 * values).to(dtype))
    result.backward(torch.ones_like(result))
    assert values.grad.dtype == torch.float32
    assert values.grad.tolist() == [1500.0, 1500.0]
    assert tensor.grad.dtype == dtype
