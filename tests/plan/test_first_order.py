import pytest
import torch
from torch.autograd import Function

from l0prune.plan.expected import first_order


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x**3

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return grad * 3 * ctx.x**2


def test_a_graph_of_the_gradient_may_be_built_but_not_followed_to_here():
    x = torch.tensor(2.0, requires_grad=True)
    y = torch.tensor(5.0, requires_grad=True)
    of_x, of_y = torch.autograd.grad(y * Cube.apply(x) + y**2, (x, y), create_graph=True)
    assert (of_x.item(), of_y.item()) == (60, 18)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_x.backward()
