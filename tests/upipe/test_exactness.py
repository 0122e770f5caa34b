"""The attention layer on real ranks equals the dense fp64 layer, output and every gradient, for any geometry and mask.

Starting ranks costs more than a case, so lists of cases run in the same ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.upipe.cases import Case, check, dense, leaves, make_inputs, on_ranks, shard
from upipe import (
    AttentionMask,
    Projections,
    Rotary,
    UlyssesAttention,
    UPipeAttention,
    headwise_attention,
    rank_pass,
    reference,
    ulysses_attention,
)
from upipe.collectives import all_reduce_sum, group_size
from upipe.schedule import valid_heads_per_stage
from upipe.testing import assert_exact, lone_rank, run_ranks

METHODS = ("upipe", "ulysses")


def check_all(cases: Sequence[tuple[str, Case]], token_tiles: int = 1) -> None:
    """Check each (method, case); a rank's tokens are cut into up to `token_tiles` tiles."""
    with mock.patch.multiple(rank_pass, MIN_TILE_TOKENS=1, TILE_SHARE=token_tiles):
        for method, case in cases:
            try:
                check(case, method)
            except Exception as error:
                raise AssertionError(f"{method}, {token_tiles} tiles: {case}") from error


# Every feature by itself, on three ranks that own unequal numbers of heads and share KV heads

BASE = Case(local_tokens=4, num_heads=10, num_kv_heads=5, heads_per_stage=6, head_dim=4, hidden=7)
FEATURES = {
    "one token a rank": replace(BASE, local_tokens=1),
    "paper's chunks": replace(BASE, heads_per_stage=None),
    "all heads at once": replace(BASE, heads_per_stage=10),
    "one query head a KV head": replace(BASE, num_kv_heads=10),
    "one KV head": replace(BASE, num_kv_heads=1),
    "fewer heads than ranks": replace(BASE, num_heads=2, num_kv_heads=2, heads_per_stage=2),
    "one head": replace(BASE, num_heads=1, num_kv_heads=1, heads_per_stage=1),
    "idle rank": replace(BASE, num_heads=8, num_kv_heads=8, heads_per_stage=3),
    "batch of three": replace(BASE, batch=3),
    "batch of two with positions a row": replace(BASE, batch=2, row_positions=True),
    "full": replace(BASE, causal=False),
    "window": replace(BASE, window=3),
    "window beyond a rank": replace(BASE, window=6),
    "documents across ranks": replace(BASE, documents=(300, 500, 800)),
    "empty documents": replace(BASE, documents=(0, 250, 250, 1000)),
    "full documents": replace(BASE, causal=False, documents=(300, 500)),
    "softcap": replace(BASE, softcap=0.7),
    "sinks": replace(BASE, sinks=True),
    "sinks, one stage": replace(BASE, sinks=True, heads_per_stage=10),
    "window, documents, softcap, sinks": replace(BASE, window=4, documents=(400,), softcap=0.7, sinks=True),
    "no rotary": replace(BASE, theta=None),
    "rotary of a part": replace(BASE, rotary_dim=2),
    "odd head size": replace(BASE, theta=None, head_dim=3),
    "biases": replace(BASE, bias=True),
    "norms": replace(BASE, qk_norm=True),
    "norms, no rotary": replace(BASE, qk_norm=True, theta=None),
    "everything learned": replace(BASE, bias=True, qk_norm=True, sinks=True),
    "scale": replace(BASE, scale=0.21),
    "kept attention": replace(BASE, keep_attention=True),
    "kept attention, batch, sinks": replace(BASE, keep_attention=True, batch=2, sinks=True),
    "frozen input": replace(BASE, frozen=("x",), sinks=True, bias=True),
    "frozen weights": replace(BASE, frozen=("q", "k", "v", "o")),
    "frozen but the output weight": replace(BASE, frozen=("x", "q", "k", "v")),
    "frozen output and key weights": replace(BASE, frozen=("o", "k"), bias=True, qk_norm=True),
    "frozen biases, norms, sinks": replace(
        BASE,
        bias=True,
        qk_norm=True,
        sinks=True,
        frozen=("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "sinks"),
    ),
    "only the biases": replace(BASE, bias=True, frozen=("x", "q", "k", "v", "o")),
    "blocked kernel": replace(BASE, kernel="blocked"),
    "reference kernel": replace(BASE, kernel="reference"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_on_three_ranks(feature):
    case = FEATURES[feature]
    run_ranks(check_all, 3, [(method, case) for method in METHODS], 2)


@pytest.mark.parametrize("method", METHODS)
def test_every_feature_alone(method):
    """Without torch.distributed, and as a group of one rank."""
    cases = [(method, replace(case, heads_per_stage=None)) for case in FEATURES.values()]
    check_all(cases, 3)
    with lone_rank():
        check_all(cases[::4])


# Any combination


@st.composite
def case_lists(draw):
    ranks = draw(st.integers(1, 4))
    return ranks, draw(st.lists(cases(ranks), min_size=10, max_size=14)), draw(st.integers(1, 3))


@st.composite
def cases(draw, ranks):
    method = draw(st.sampled_from(("upipe", "upipe", "ulysses")))
    num_kv_heads, tokens, batch = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 4))
    head_dim, theta = draw(st.integers(1, 6)), draw(st.sampled_from([None, 50.0]))
    if theta is not None:
        head_dim += head_dim % 2
    causal = draw(st.booleans())
    names = ["x", "q", "k", "v", "o"]
    bias, qk_norm, sinks = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    names += ["q_bias", "k_bias", "v_bias", "o_bias"] * bias + ["q_norm", "k_norm"] * qk_norm + ["sinks"] * sinks
    frozen = draw(st.just(()) | st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1).map(tuple))
    borders = st.lists(st.integers(0, 1000), max_size=3).map(tuple)
    return method, Case(
        batch=batch,
        local_tokens=tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_stage=draw(st.sampled_from(valid_heads_per_stage(num_heads, ranks))),
        head_dim=head_dim,
        hidden=draw(st.integers(1, 9)),
        causal=causal,
        window=draw(st.none() | st.integers(1, 2 * tokens)) if causal else None,
        documents=draw(st.none() | borders) if batch == 1 else None,
        softcap=draw(st.none() | st.just(0.9)),
        sinks=sinks,
        theta=theta,
        rotary_dim=draw(st.none() | st.integers(1, head_dim // 2).map(lambda half: 2 * half)) if theta else None,
        row_positions=draw(st.booleans()),
        bias=bias,
        qk_norm=qk_norm,
        scale=draw(st.none() | st.just(0.4)),
        keep_attention=draw(st.booleans()),
        frozen=frozen,
        seed=draw(st.integers(0, 999)),
    )


@settings(max_examples=10, deadline=None)
@given(case_lists())
def test_search(drawn):
    ranks, drawn_cases, token_tiles = drawn
    if ranks == 1:
        check_all(drawn_cases, token_tiles)
    else:
        run_ranks(check_all, ranks, drawn_cases, token_tiles)


# Buffers nobody wrote


def check_all_with_nan_in_new_memory(cases: Sequence[tuple[str, Case]]) -> None:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2).new_empty(2, 2, dtype=torch.bfloat16).isnan().all()
    check_all(cases, 3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nothing_reads_memory_that_was_not_written(ranks):
    names = ("idle rank", "one KV head", "empty documents", "everything learned", "kept attention, batch, sinks")
    cases = [FEATURES[name] for name in names] + [replace(BASE, batch=2, kernel="blocked"), FEATURES["one head"]]
    some = [replace(case, heads_per_stage=None) for case in cases]
    run_ranks(check_all_with_nan_in_new_memory, ranks, [(method, case) for case in some for method in METHODS])


# Two groups in one process, and geometry that differs by layer

WIDTH, TOKENS = 7, 4


def two_layers(method: str) -> None:
    """A layer over half of the ranks, then one over all of them: attention in halves, then over the whole."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world = dist.group.WORLD
    here = pairs[dist.get_rank() // 2]
    kind = {"upipe": UPipeAttention, "ulysses": UlyssesAttention}[method]
    torch.manual_seed(0)
    shared = {"dtype": torch.float64, "qkv_bias": True}
    local = kind(WIDTH, 6, 2, head_dim=4, group=here, rotary=Rotary(100.0, 4), **shared)
    whole = kind(WIDTH, 5, 5, head_dim=2, group=world, rotary=Rotary(30.0, 2), **shared)
    x = torch.randn(1, 4 * TOKENS, WIDTH, dtype=torch.float64)
    dy = torch.randn_like(x)

    expected = x.clone().requires_grad_()
    hidden = expected + dense_layer(local, expected, theta=100.0, borders=(0, 2 * TOKENS, 4 * TOKENS))
    y = hidden + dense_layer(whole, hidden, theta=30.0)
    parameters = {**named(local, "local"), **named(whole, "whole")}
    truth = dict(zip(["x", *parameters], torch.autograd.grad(y, [expected, *parameters.values()], dy), strict=True))

    ours = shard(x, world).requires_grad_()
    positions = shard(torch.arange(4 * TOKENS)[None], world)[0]
    hidden = ours + local(ours, positions=positions)
    (hidden + whole(hidden)).backward(shard(dy, world))
    assert_exact(ours.grad, shard(truth["x"], world), "x")
    for name, parameter in parameters.items():
        assert_exact(all_reduce_sum(parameter.grad, world), truth[name], name)


def named(module: torch.nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}


def dense_layer(
    layer: UPipeAttention, x: Tensor, *, theta: float | None = None, borders: Sequence[int] | None = None
) -> Tensor:
    weights = {
        name: tensor
        for name, tensor in zip(Projections.tensor_names(), layer.projections().tensors(), strict=True)
        if tensor is not None
    }
    return reference.attention_layer(
        x,
        weights,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        theta=theta,
        cu_seqlens=None if borders is None else torch.tensor(borders, dtype=torch.int32),
        sinks=layer.sinks,
    )


@pytest.mark.parametrize("method", METHODS)
def test_two_groups_and_two_geometries_in_one_process(method):
    run_ranks(two_layers, 4, method)


# What autograd does around the layer


def unusual_gradients(method: str, keep_attention: bool) -> None:
    """Non-contiguous input, expanded upstream gradient, ``.grad`` accumulated over two calls."""
    group = dist.group.WORLD if dist.is_initialized() else None
    kind = {"upipe": UPipeAttention, "ulysses": UlyssesAttention}[method]
    options = {"keep_attention": True} if keep_attention else {}
    torch.manual_seed(1)
    layer = kind(WIDTH, 6, 3, head_dim=4, group=group, sinks=True, qkv_bias=True, dtype=torch.float64, **options)
    whole = torch.randn(2, 2, WIDTH, group_size(group) * TOKENS, dtype=torch.float64)
    truth = [torch.zeros_like(parameter) for parameter in layer.parameters()]
    for micro_batch in whole:
        everything = micro_batch.transpose(1, 2).contiguous().requires_grad_()
        grads = torch.autograd.grad(dense_layer(layer, everything).sum(), [everything, *layer.parameters()])
        truth = [total + grad for total, grad in zip(truth, grads[1:], strict=True)]
        x = micro_batch.chunk(group_size(group), dim=-1)[0 if group is None else group.rank()].transpose(1, 2)
        assert not x.is_contiguous()
        before = x.clone()
        x = x.requires_grad_()
        layer(x).sum().backward()
        assert torch.equal(x, before), "the input was written"
        assert_exact(x.grad, shard(grads[0], group), "x")
    for (name, parameter), expected in zip(layer.named_parameters(), truth, strict=True):
        assert_exact(all_reduce_sum(parameter.grad, group), expected, name)


@pytest.mark.parametrize(("method", "keep_attention"), [("upipe", False), ("upipe", True), ("ulysses", False)])
def test_strided_input_expanded_gradient_and_accumulation(method, keep_attention):
    unusual_gradients(method, keep_attention)
    run_ranks(unusual_gradients, 2, method, keep_attention)


def odd_strides_of_the_function() -> None:
    """q, k and v with a strided last dim, and an upstream gradient that is one number, expanded."""
    group = dist.group.WORLD if dist.is_initialized() else None
    generator = torch.Generator().manual_seed(5)
    whole = [
        torch.randn(2, group_size(group) * TOKENS, heads, 5, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    everything = [tensor.clone().requires_grad_() for tensor in whole]
    expected, _ = reference.attention(*everything)
    truth = torch.autograd.grad(expected.sum(), everything)
    mine = [shard(tensor, group).transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for tensor in whole]
    out = ulysses_attention(*mine, group=group, mask=AttentionMask())
    assert_exact(out.detach(), shard(expected.detach(), group), "out")
    for name, grad, wanted in zip("qkv", torch.autograd.grad(out.sum(), mine), truth, strict=True):
        assert_exact(grad, shard(wanted, group), name)


def test_odd_strides_of_the_function():
    odd_strides_of_the_function()
    run_ranks(odd_strides_of_the_function, 2)


@pytest.mark.parametrize("keep_attention", [False, True])
def test_second_backward_of_a_kept_graph(keep_attention):
    """Neither what was saved nor the upstream gradient is overwritten."""
    case = replace(BASE, batch=2, sinks=True, bias=True, qk_norm=True)
    inputs = make_inputs(case, 1)
    named, x = leaves(inputs, case), inputs.x.clone().requires_grad_()
    proj = Projections(**{name: tensor for name, tensor in named.items() if name != "sinks"})
    y = headwise_attention(
        x,
        proj,
        group=None,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        heads_per_stage=3,
        mask=AttentionMask(sinks=named["sinks"]),
        keep_attention=keep_attention,
    )
    dy = inputs.dy.clone()
    first = torch.autograd.grad(y, [x, *named.values()], dy, retain_graph=True)
    second = torch.autograd.grad(y, [x, *named.values()], dy)
    assert torch.equal(dy, inputs.dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_a_gradient_the_output_is_the_same():
    case = replace(BASE, heads_per_stage=4, sinks=True)
    truth = dense(case, make_inputs(case, 1))["y"]
    named = leaves(inputs := make_inputs(case, 1), case)
    proj = Projections(**{name: tensor for name, tensor in named.items() if name != "sinks"})
    with torch.no_grad():
        y = headwise_attention(
            inputs.x,
            proj,
            group=None,
            num_heads=10,
            num_kv_heads=5,
            heads_per_stage=4,
            rotary=Rotary(case.theta, case.head_dim),
            mask=AttentionMask(sinks=named["sinks"]),
        )
    assert not y.requires_grad
    assert_exact(y, truth, "y")


# Autocast


def single(case: Case, inputs, low: torch.dtype | None, autocast: bool) -> dict[str, Tensor]:
    """The layer on fp32 leaves, cast by hand to `low`, or by autocast."""
    named, x = leaves(inputs, case), inputs.x.clone().requires_grad_()
    cast = {name: t if low is None or "norm" in name else t.to(low) for name, t in named.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = headwise_attention(
            x if low is None else x.to(low),
            Projections(**{name: tensor for name, tensor in cast.items() if name != "sinks"}),
            group=None,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            heads_per_stage=3,
            rotary=Rotary(case.theta, case.head_dim),
            mask=AttentionMask(sinks=named["sinks"]),
        )
    grads = torch.autograd.grad(y, [x, *named.values()], inputs.dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(["x", *named], grads, strict=True))}


def test_autocast_is_casting():
    case = replace(BASE, batch=2, local_tokens=9, bias=True, qk_norm=True, sinks=True)
    inputs = make_inputs(case, 1, torch.float32)
    ours, expected = single(case, inputs, None, True), single(case, inputs, torch.bfloat16, False)
    assert ours["y"].dtype == torch.bfloat16
    for name, value in ours.items():
        assert value.dtype == (torch.bfloat16 if name == "y" else torch.float32)
        assert torch.equal(value, expected[name]), name
    exact = single(case, inputs, None, False)
    assert not torch.equal(exact["x"], ours["x"])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", [UPipeAttention, UlyssesAttention])
def test_modules_under_autocast(kind, qk_norm):
    """fp32 modules train under autocast, close to fp32, without a warning."""
    torch.manual_seed(3)
    layer = kind(WIDTH, 6, 3, head_dim=4, group=None, rotary=Rotary(100.0, 4), qk_norm=qk_norm, qkv_bias=True)
    x = torch.randn(2, 9, WIDTH)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert 0 < (y.float() - expected).norm() / expected.norm() < 2e-2
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_on_ranks_reports_what_it_differentiates():
    """The harness: a frozen tensor has no entry, everything else has one."""
    case = replace(BASE, sinks=True, frozen=("x", "k"))
    inputs = make_inputs(case, 1)
    assert set(on_ranks(case, inputs, "upipe", None)) == set(dense(case, inputs)) == {"y", "q", "v", "o", "sinks"}
