import importlib
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import upipe
from upipe.memory import Timeline, label, trace

# The package's attribute of that name is the function.
trace_module = importlib.import_module("upipe.memory.trace")


@torch.library.custom_op("upipe_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    scratch = x + 1000
    return scratch.sub(1000).mul(2)


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


class TestStream:
    """The stream of ops and bytes is that of real tensors, under fake ones."""

    @staticmethod
    def training_step() -> Timeline:
        """Three layers, each with a distinct feature, trained one step."""
        up, down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        attention = upipe.UPipeAttention(8, 4, 2, head_dim=6, group=None, rotary=upipe.Rotary(1e4, 6))
        x = torch.randn(1, 10, 8, requires_grad=True)

        def mlp(h: Tensor) -> Tensor:
            with label("mlp.tile"):
                return down(F.silu(up(h)))

        def step() -> None:
            h = x + attention(x)
            h = h + checkpoint(mlp, h, use_reentrant=False)
            q, k, v = (h.view(1, 10, 2, 4).transpose(1, 2) * factor for factor in (1, 2, 3))
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 10, 8)
            loss = twice(h).square().mean() + torch.tensor(1.0)
            loss.backward()

        return trace(step)

    def both(self) -> tuple[Timeline, Timeline]:
        torch.manual_seed(0)
        real = self.training_step()
        with FakeTensorMode():
            fake = self.training_step()
        return real, fake

    def test_is_the_same_for_real_and_fake_tensors(self):
        real, fake = self.both()
        assert real.stream() == fake.stream()
        assert len(real.events) > 100
        assert real == fake

    def test_differs_when_all_ops_are_taken(self, monkeypatch):
        monkeypatch.setattr(trace_module, "_IGNORED", frozenset())
        real, fake = self.both()
        assert real.stream() != fake.stream()

    @pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
    def test_a_custom_op_is_opaque(self, mode):
        with mode():
            x = torch.zeros(100)
            timeline = trace(lambda: twice(x))
        assert timeline.op_counts == {"upipe_test.twice.default": 1}
        assert timeline.peak_bytes == 800
