import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from upipe.memory import Timeline, label, trace

if not hasattr(torch.ops.upipe, "to_host"):

    @torch.library.custom_op("upipe::to_host", mutates_args=())
    def to_host(x: Tensor) -> Tensor:
        return x.clone()

    to_host.register_fake(torch.empty_like)


def floats(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float32)


def live(timeline: Timeline) -> list[int]:
    return [event.live_bytes for event in timeline.events]


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
