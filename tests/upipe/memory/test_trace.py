import gc
import importlib
import time
import weakref
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import upipe
from upipe.memory import Timeline, label, table, trace
from upipe.memory.ledger import Ledger

# The package's attribute of that name is the function.
trace_module = importlib.import_module("upipe.memory.trace")


@torch.library.custom_op("upipe_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    scratch = x + 1000
    return scratch.sub(1000).mul(2)


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)

if not hasattr(torch.ops.upipe, "to_host"):

    @torch.library.custom_op("upipe::to_host", mutates_args=())
    def to_host(x: Tensor) -> Tensor:
        return x.clone()

    to_host.register_fake(torch.empty_like)


def floats(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float32)


def live(timeline: Timeline) -> list[int]:
    return [event.live_bytes for event in timeline.events]


class TestBytes:
    def test_a_chain_that_frees(self):
        x = floats(100)

        def chain():
            a = x + 1
            b = torch.cat([a, a])
            del a
            return b * 3

        timeline = trace(chain)
        assert live(timeline) == [400, 800, 1600, 2000, 400]
        assert timeline.stream() == (
            ("start", (), ()),
            ("aten.add.Tensor", (400,), ()),
            ("aten.cat.default", (800,), (400,)),
            ("aten.mul.Tensor", (800,), (800, 800)),
            ("end", (), ()),
        )
        assert timeline.peak_bytes == 2000
        assert timeline.peak_event.op == "aten.mul.Tensor"

    def test_the_order_of_frees_decides(self):
        x = floats(100)

        def late():
            a = x + 1
            b = torch.cat([a, a])
            return a, b * 3

        assert trace(late).peak_bytes == 400 + 400 + 800 + 800

    def test_what_is_returned_is_dropped_inside_and_what_is_kept_is_not(self):
        x, kept = floats(100), []
        assert trace(lambda: x + 1).events[-2].freed_bytes == (400,)
        timeline = trace(lambda: kept.append(x + 1))
        assert timeline.events[-2].freed_bytes == ()
        assert live(timeline)[-1] == 800

    def test_in_place_and_views_are_no_new_storage(self):
        def views():
            x = floats(100)
            x.add_(1)
            part = x[90:]
            del x
            floats(50)
            part.mul_(2)
            del part
            floats(10)

        timeline = trace(views)
        assert live(timeline) == [0, 400, 400, 400, 600, 400, 40, 0]

    def test_a_new_tensor_over_the_memory_of_a_freed_one_is_counted_again(self):
        def loop():
            for _ in range(5):
                floats(100)

        timeline = trace(loop)
        assert timeline.op_counts == {"aten.zeros.default": 5}
        assert live(timeline) == [0, 400, 400, 400, 400, 400, 0]

    def test_what_autograd_saves_stays_until_backward_frees_it_in_cpp(self):
        x = floats(100).requires_grad_()

        def step():
            y = x.exp().exp()  # both exps save their output
            z = y.sum()
            del y
            z.backward()

        timeline = trace(step)
        ops = [event.op for event in timeline.events]
        assert live(timeline)[ops.index("aten.sum.default")] == 3 * 400 + 4
        # The product with the outer exp frees its output; the 4 bytes of z and of its gradient stay to the end.
        first, second = (i for i, op in enumerate(ops) if op == "aten.mul.Tensor")
        assert timeline.events[first].freed_bytes == (400,)
        assert live(timeline)[first] == 3 * 400 + 4 + 4 + 400
        assert live(timeline)[second] == 4 * 400 + 4 + 4

    def test_numbers_made_inside_were_not_there_before(self):
        timeline = trace(lambda: torch.tensor([1.0, 2.0]) + 1)
        assert timeline.baseline == ()
        assert live(timeline) == [0, 8, 16, 0]

    def test_meta_tensors_hold_nothing(self):
        assert trace(lambda: torch.empty(100, device="meta") + 1).peak_bytes == 0

    def test_sparse_tensors_are_refused(self):
        with pytest.raises(ValueError, match=r"strided tensors, not layout torch.sparse_coo"):
            trace(lambda: torch.eye(3).to_sparse())

    def test_the_tally_of_torchs_own_profiler(self):
        weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(4)]
        x = torch.randn(64, 16)

        def step():
            h = x
            for weight in weights:
                h = torch.sin(h @ weight)
            h.sum().backward()

        def allocator_peak() -> int:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step()
            events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
            total = peak = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                total += event.nbytes()
                peak = max(peak, total)
            return peak

        expected = allocator_peak()
        for weight in weights:
            weight.grad = None
        timeline = trace(step)
        assert timeline.peak_bytes == expected + x.nbytes + sum(weight.nbytes for weight in weights)


class TestResize:
    @staticmethod
    def resizing(x: Tensor, other: Tensor):
        def run():
            x.add_(1)
            x.untyped_storage().resize_(0)
            other + 1
            x.untyped_storage().resize_(1200)
            other + 1
            x.untyped_storage().resize_(0)

        return run

    def test_is_seen_at_the_next_allocation(self):
        timeline = trace(self.resizing(floats(100), floats(10)))
        assert timeline.stream() == (
            ("start", (), ()),
            ("aten.add_.Tensor", (), (400,)),
            ("aten.add.Tensor", (40,), (40,)),
            ("aten.add.Tensor", (40, 1200), (40, 1200)),
            ("end", (), ()),
        )
        assert live(timeline) == [440, 440, 80, 1280, 40]

    def test_a_trace_blind_to_it_is_wrong(self, monkeypatch):
        monkeypatch.setattr(Ledger, "notice_resizes", lambda *args: None)
        assert trace(self.resizing(floats(100), floats(10))).peak_bytes == 480

    def test_shrinking_one_and_growing_another_never_counts_both(self):
        a, b = floats(100), floats(100)

        def swap():
            a.add_(1)
            a.untyped_storage().resize_(0)
            b.untyped_storage().resize_(400)
            b.add_(1)

        b.untyped_storage().resize_(0)
        timeline = trace(swap, owners={"weights": [a, b]})
        assert live(timeline) == [400, 400, 400, 400]
        assert timeline.at_peak == {"weights": 400}

    def test_an_op_that_grows_its_argument(self):
        timeline = trace(lambda: floats(10).resize_(100).resize_(20))  # resize_ keeps a storage that is large enough
        assert live(timeline) == [0, 40, 400, 400, 0]


class TestOwners:
    def test_of_a_training_step(self):
        weight, x = nn.Parameter(floats(100)), floats(100)
        state = floats(100)

        def step():
            with label("mlp.up"):
                h = weight * x
            h.sum().backward()
            state.add_(weight.grad)

        timeline = trace(step, owners={"optimizer": [state]})
        assert sum(timeline.at_peak.values()) == timeline.peak_bytes
        assert timeline.at_peak == {
            "parameter": 400, "input": 400, "optimizer": 400, "mlp.up": 400, "gradient": 400, "other": 8
        }  # fmt: skip
        assert {block.owner: block.num_bytes for block in timeline.baseline} == {
            "parameter": 400, "input": 400, "optimizer": 400
        }  # fmt: skip
        assert timeline.peak_without("parameter", "gradient") == timeline.peak_bytes - 800
        assert "gradient" not in timeline.at_peak_without("parameter", "gradient")

    def test_peak_without_finds_a_moment_of_its_own(self):
        def run():
            with label("big"):
                a = floats(1000)
                b = floats(10)
            del a, b
            floats(30)

        timeline = trace(run)
        assert timeline.at_peak == {"big": 4040}
        assert timeline.at_peak_without("big") == {"other": 120}

    def test_a_gradient_set_to_none_at_the_end_was_one(self):
        weight = nn.Parameter(floats(100))

        def step():
            (weight * 2).sum().backward()
            with torch.no_grad():
                weight.sub_(weight.grad)
            weight.grad = None

        assert trace(step).events[-2].freed[-1].owner == "gradient"

    def test_gradients_there_before_count_from_the_start(self):
        weight = nn.Parameter(floats(100))
        weight.grad = floats(100)
        timeline = trace(lambda: None, owners={"parameter": [weight]})
        assert timeline.at_peak == {"parameter": 400, "gradient": 400}

    def test_one_storage_under_two_owners_is_refused(self):
        x = floats(100)
        with pytest.raises(ValueError, match=r"'b' and 'a' share a storage \(met as \[50\]\); name it under one"):
            trace(lambda: None, owners={"a": [x], "b": [x[:50]]})

    def test_regions_nest_and_end_in_any_order(self):
        def owners_of(run) -> list[str]:
            return [event.new[0].owner for event in trace(run).events[1:-1]]

        def nested():
            with label("a"), torch.profiler.record_function("Optimizer.step#AdamW.step"):
                floats(1)
                with label("b"):
                    floats(2)
                floats(3)
            floats(4)

        def crossed():
            a, b = label("a"), label("b")
            a.__enter__()
            b.__enter__()
            a.__exit__(None, None, None)
            floats(1)
            b.__exit__(None, None, None)
            floats(2)

        def broken():
            with pytest.raises(KeyError), label("a"):
                raise KeyError
            floats(1)

        assert owners_of(nested) == ["a", "b", "a", "other"]
        assert owners_of(crossed) == ["b", "other"]
        assert owners_of(broken) == ["other"]

    def test_the_same_labels_show_in_torchs_profiler(self):
        with profile(activities=[ProfilerActivity.CPU]) as profiled, label("attn.q"):
            floats(1)
        assert "upipe/attn.q" in {event.key for event in profiled.key_averages()}

    def test_workspace_counts_while_the_outputs_are_alive(self):
        def workspace(op, args, kwargs) -> int:
            return 7000 if op is torch.ops.aten.mul.Tensor else 0

        timeline = trace(lambda: floats(100) * 2 + 1, workspace=workspace)
        assert live(timeline) == [0, 400, 7800, 800, 0]
        assert timeline.at_peak == {"kernel.workspace": 7000, "other": 800}

    def test_the_kernels_of_upipe_declare_theirs(self, monkeypatch):
        monkeypatch.setattr("upipe.kernels.workspace_bytes", lambda op, args, kwargs: 123)
        assert trace(lambda: floats(100)).at_peak == {"other": 400, "kernel.workspace": 123}

    def test_a_copy_on_the_host_is_host_memory(self):
        x = floats(100)

        def offload():
            y = x + 1
            z = torch.ops.upipe.to_host(y)
            del y
            return z[:10]

        timeline = trace(offload)
        assert (timeline.peak_bytes, timeline.host_peak_bytes) == (800, 400)
        assert sum(timeline.at_peak.values()) == 800
        assert [event.host_bytes for event in timeline.events] == [0, 0, 400, 400, 0]


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
            x = floats(100)
            timeline = trace(lambda: twice(x))
        assert timeline.op_counts == {"upipe_test.twice.default": 1}
        assert timeline.peak_bytes == 800


class TestSideEffects:
    def test_none_are_left_after_an_exception(self):
        kept = []

        def fail():
            kept.append(floats(100))
            raise KeyError("mine")

        assert gc.isenabled()
        with pytest.raises(KeyError, match="mine"):
            trace(fail)
        assert gc.isenabled()
        alive = weakref.ref(kept[0].untyped_storage())
        kept.clear()
        assert alive() is None

    def test_a_reference_cycle_counts_as_alive_in_every_run(self):
        def cycle():
            for _ in range(50):
                loop = [floats(100)]
                loop.append(loop)
                [[] for _ in range(1000)]  # enough objects for the collector to wake up

        with ExitStack() as stack:
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(100)
            assert trace(cycle).peak_bytes == 50 * 400


class TestCost:
    @staticmethod
    def per_op_ms(run, repeats: int = 5, ops: int = 200) -> float:
        def timed() -> float:
            start = time.thread_time()
            for _ in range(ops):
                run()
            return (time.thread_time() - start) / ops * 1e3

        return min(timed() for _ in range(repeats))

    @pytest.mark.parametrize("run", [lambda x: x + 1, lambda x: x.view(2, 5)], ids=["allocates", "views"])
    def test_with_500_live_storages(self, run):
        x, others, traced = floats(10), [floats(10) for _ in range(500)], []
        trace(lambda: traced.append(self.per_op_ms(lambda: run(x))), owners={"other": others})
        # Several times what it takes on an idle core: a bound that a shared machine keeps.
        assert traced[0] - self.per_op_ms(lambda: run(x)) < 0.3


class TestTable:
    def test_reads(self):
        def run():
            with label("attn.q"):
                q = torch.empty(2**20, dtype=torch.uint8)
            with label("attn.out"):
                return torch.cat([q, q])

        assert table(trace(run), unit_bytes=2**20) == (
            "peak at aten.cat.default in attn.out\n"
            "owner            bytes    GiB      A\n"
            "------------------------------------\n"
            "attn.out     2,097,152  0.002  2.000\n"
            "attn.q       1,048,576  0.001  1.000\n"
            "------------------------------------\n"
            "device peak  3,145,728  0.003  3.000\n"
            "host peak            0  0.000  0.000"
        )

    def test_without_a_unit(self):
        assert table(trace(lambda: floats(100))).splitlines()[1] == "owner        bytes    GiB"

    def test_refuses_a_unit_below_one_byte(self):
        with pytest.raises(ValueError, match=r"unit_bytes=0 must be at least 1 byte"):
            table(trace(lambda: None), unit_bytes=0)

    def test_repr_is_short(self):
        assert repr(trace(lambda: floats(1000))) == "Timeline(4,000 bytes at the peak, 0 on the host, 1 ops)"
