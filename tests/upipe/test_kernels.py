"""Every kernel against dense fp64 attention and its autograd; flash-attn through stand-ins with the real signatures."""

import importlib.machinery
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from upipe import AttentionMask, reference
from upipe.kernels import KERNELS, Kernel, blocked, flash, select_kernel, sink_gradient, workspace_bytes
from upipe.kernels import _log_choice as log_choice
from upipe.testing import assert_exact, relative_error

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
SCALE = 0.37


@dataclass(frozen=True)
class Problem:
    batch: int = 2
    tokens: int = 11
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 5
    causal: bool = True
    window: int | None = None
    borders: tuple[int, ...] | None = None
    softcap: float | None = None
    sinks: bool = False
    strided: bool = True
    transposed: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None
    cu_seqlens: Tensor | None

    def mask(self, problem: Problem) -> AttentionMask:
        return AttentionMask(problem.causal, problem.window, self.cu_seqlens, problem.softcap, self.sinks)


def make(problem: Problem, dtype: torch.dtype = torch.float64) -> Tensors:
    """Random tensors; strided ones are slices of wider buffers, as the stages cut them, transposed ones a user's."""
    generator = torch.Generator().manual_seed(problem.seed)
    batch, tokens, size = problem.batch, problem.tokens, problem.head_dim

    def random(*shape: int) -> Tensor:
        return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    q, dout = random(batch, tokens, problem.heads + 2, size), random(batch, tokens, problem.heads + 3, size)
    kv = random(batch, tokens, 2, problem.kv_heads + 1, size)
    pieces = q[:, :, 1:-1], kv[:, :, 0, 1:], kv[:, :, 1, 1:], dout[:, :, 3:]
    if not problem.strided:
        pieces = tuple(piece.contiguous() for piece in pieces)
    if problem.transposed:
        pieces = tuple(piece.transpose(-1, -2).contiguous().transpose(-1, -2) for piece in pieces)
    return Tensors(
        *pieces,
        sinks=random(problem.heads) if problem.sinks else None,
        cu_seqlens=None if problem.borders is None else torch.tensor(problem.borders, dtype=torch.int32),
    )


def truth(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    leaves = {name: getattr(tensors, name) for name in ("q", "k", "v", "sinks")}
    leaves = {name: t.double().clone().requires_grad_() for name, t in leaves.items() if t is not None}
    out, lse = reference.attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        causal=problem.causal,
        window=problem.window,
        cu_seqlens=tensors.cu_seqlens,
        softcap=problem.softcap,
        sinks=leaves.get("sinks"),
        scale=SCALE,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), tensors.dout.double())
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def run(kernel: Kernel, problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    mask = tensors.mask(problem)
    before = [t.clone() for t in (tensors.q, tensors.k, tensors.v, tensors.dout)]
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, mask, SCALE)
    kept = out.clone(), lse.clone()
    dq, dk, dv = kernel.backward(tensors.dout, tensors.q, tensors.k, tensors.v, out, lse, mask, SCALE)
    for old, new in zip((*before, *kept), (tensors.q, tensors.k, tensors.v, tensors.dout, out, lse), strict=True):
        assert torch.equal(old, new), "the kernel wrote into its input"
    result = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if tensors.sinks is not None:
        result["dsinks"] = sink_gradient(tensors.sinks, tensors.dout, out, lse, tile_tokens=4)
    return result


def check(kernel: Kernel, problem: Problem) -> None:
    tensors = make(problem)
    ours, expected = run(kernel, problem, tensors), truth(problem, tensors)
    assert set(ours) == set(expected)
    for name, value in ours.items():
        assert_exact(value, expected[name], f"{name} of {kernel.name} for {problem}")


DENSE = Problem()
EVERYTHING = Problem(batch=1, tokens=13, window=4, borders=(0, 3, 3, 10, 13), softcap=1.3, sinks=True)
FEATURES = {
    "causal": DENSE,
    "full": replace(DENSE, causal=False),
    "contiguous": replace(DENSE, strided=False),
    "last dim strided": replace(DENSE, transposed=True),
    "one query head a KV head": replace(DENSE, kv_heads=6),
    "one KV head": replace(DENSE, kv_heads=1),
    "one token": replace(DENSE, tokens=1),
    "one head of size one": replace(DENSE, heads=1, kv_heads=1, head_dim=1),
    "sinks": replace(DENSE, sinks=True),
    "full, sinks": replace(DENSE, causal=False, sinks=True),
    "window": replace(DENSE, window=3),
    "window of the query alone": replace(DENSE, window=1),
    "window beyond the sequence": replace(DENSE, window=100),
    "softcap": replace(DENSE, softcap=0.8),
    "full, softcap": replace(DENSE, causal=False, softcap=0.8),
    "documents": replace(DENSE, batch=1, borders=(0, 4, 5, 11)),
    "full, documents": replace(DENSE, batch=1, causal=False, borders=(0, 4, 5, 11)),
    "empty documents": replace(DENSE, batch=1, borders=(0, 0, 0, 6, 6, 11, 11)),
    "everything": EVERYTHING,
}
COVERED_BY_SDPA = [name for name, p in FEATURES.items() if p.window is p.borders is p.softcap is None]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", ["blocked", "reference"])
def test_feature(name, feature):
    check(BY_NAME[name], FEATURES[feature])


@pytest.mark.parametrize("feature", COVERED_BY_SDPA)
def test_feature_of_sdpa(feature):
    check(BY_NAME["sdpa"], FEATURES[feature])


@st.composite
def problems(draw, simple: bool = False):
    kv_heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    causal = draw(st.booleans())
    borders = None
    if not simple and draw(st.booleans()):
        borders = (0, *sorted(draw(st.lists(st.integers(0, tokens), max_size=4))), tokens)
    return Problem(
        batch=1 if borders else draw(st.integers(1, 3)),
        tokens=tokens,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 3, 7, 8])),
        causal=causal,
        window=draw(st.none() | st.integers(1, tokens + 2)) if causal and not simple else None,
        borders=borders,
        softcap=None if simple else draw(st.none() | st.sampled_from([0.5, 3.0])),
        sinks=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


search = settings(max_examples=40, deadline=None)


@search
@given(problems(), st.integers(1, 14))
def test_blocked_over_masks_and_block_sizes(problem, rows):
    row_bytes = 8 * problem.batch * problem.heads * problem.tokens
    with mock.patch.object(blocked, "SCORE_BYTES", rows * row_bytes):
        check(blocked.KERNEL, problem)


@search
@given(problems())
def test_reference_over_masks(problem):
    check(BY_NAME["reference"], problem)


@search
@given(problems(simple=True))
def test_sdpa_over_shapes(problem):
    check(BY_NAME["sdpa"], problem)


@search
@given(problems(), st.integers(1, 5))
def test_blocks_hold_every_visible_pair_once_and_no_row_of_hidden_keys(problem, rows):
    tensors = make(problem)
    seen = reference.visible(
        problem.tokens, causal=problem.causal, window=problem.window, cu_seqlens=tensors.cu_seqlens
    )
    count = torch.zeros(problem.tokens, problem.tokens, dtype=torch.int64)
    with mock.patch.object(blocked, "SCORE_BYTES", rows * 8 * problem.batch * problem.heads * problem.tokens):
        for queries, keys in blocked._blocks(tensors.q, problem.causal, problem.window, tensors.cu_seqlens):
            assert 1 <= queries.stop - queries.start <= rows
            assert seen[queries, keys].any(0).all(), "keys that no query of the block sees"
            count[queries, keys] += 1
    assert (count[seen] == 1).all()
    assert count.max() <= 1


def no_softcap_slope(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    return {"backward": lambda self, *args: kernel.backward(*args[:-2], args[-2].__class__(args[-2].causal), args[-1])}


def window_off_by_one(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    def forward(self, q, k, v, mask, scale):
        return kernel.forward(q, k, v, replace(mask, window=mask.window + 1), scale)

    return {"forward": forward}


def sinks_left_out_of_lse(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    def forward(self, q, k, v, mask, scale):
        out, _ = kernel.forward(q, k, v, mask, scale)
        return out, kernel.forward(q, k, v, mask.with_sinks(None), scale)[1]

    return {"forward": forward}


def heads_interleaved(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    """K repeated as ``[k0 k1 k2 k0 k1 k2]``, as if query head h read KV head h % K."""

    def forward(self, q, k, v, mask, scale):
        times = q.shape[2] // k.shape[2]
        return kernel.forward(q, k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1), mask, scale)

    return {"forward": forward}


@pytest.mark.parametrize(
    ("mutant", "feature", "quantity"),
    [
        (no_softcap_slope, "softcap", "dq"),
        (window_off_by_one, "window", "out"),
        (sinks_left_out_of_lse, "sinks", "lse"),
        (heads_interleaved, "causal", "out"),
    ],
)
def test_check_catches_mutants(mutant, feature, quantity):
    problem = FEATURES[feature]
    base = BY_NAME["blocked"]
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    broken = type("Broken", (Kernel,), mutant(base, problem))(**fields)
    with pytest.raises(AssertionError, match=f"^{quantity} of blocked"):
        check(broken, problem)


@pytest.mark.parametrize("name", ["sdpa", "blocked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_sums_in_fp32(name, dtype):
    problem = replace(DENSE, tokens=70, head_dim=16, sinks=True)
    tensors = make(problem, dtype)
    ours, expected = run(BY_NAME[name], problem, tensors), truth(problem, tensors)
    assert ours["lse"].dtype == torch.float32
    # Rounding once costs eps / 2 at most; PyTorch's kernel also rounds probabilities to the dtype.
    eps = torch.finfo(dtype).eps
    assert relative_error(ours["lse"], expected["lse"]) < (1e-5 if name != "sdpa" else eps)
    for quantity in ("out", "dq", "dk", "dv", "dsinks"):
        assert ours[quantity].dtype == dtype
        assert relative_error(ours[quantity], expected[quantity]) < max(2e-6, 1.5 * eps), quantity


def op_arguments(kernel: Kernel, problem: Problem, dtype: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    tensors = make(problem, dtype)
    mask = tensors.mask(replace(problem, sinks=False))
    flat = (mask.causal, mask.window, mask.cu_seqlens, mask.softcap, SCALE)
    inputs = (tensors.q, tensors.k, tensors.v)
    yield kernel.forward_op, (*inputs, *flat)
    if kernel is flash.KERNEL:  # needs a device; its fake is all there is to run
        out, lse = BY_NAME["reference"].forward_op(*inputs, *flat)
    else:
        out, lse = kernel.forward_op(*inputs, *flat)
    yield kernel.backward_op, (tensors.dout, *inputs, out, lse, *flat)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sdpa", DENSE),
        ("sdpa", replace(DENSE, causal=False, strided=False)),
        ("blocked", DENSE),
        ("blocked", replace(EVERYTHING, sinks=False)),
        ("reference", replace(EVERYTHING, sinks=False)),
    ],
)
def test_opcheck(name, problem):
    for op, arguments in op_arguments(BY_NAME[name], problem, torch.float32):
        torch.library.opcheck(op, arguments)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "blocked", "reference"])
def test_fake_results_look_like_real_ones(name, strided, dtype):
    for op, arguments in op_arguments(BY_NAME[name], replace(DENSE, strided=strided), dtype):
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        assert [layout(t) for t in fake] == [layout(t) for t in real]
        assert all(t.is_contiguous() for t in real)


def test_flash_can_be_traced_without_the_package():
    """Fake flash ops import nothing and look like those of the reference."""
    pairs = zip(
        op_arguments(flash.KERNEL, DENSE, torch.bfloat16),
        op_arguments(BY_NAME["reference"], DENSE, torch.bfloat16),
        strict=True,
    )
    with mock.patch.object(flash, "_interface", side_effect=AssertionError("imported under fake tensors")):
        for (op, arguments), (other, _) in pairs:
            with FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
            assert [layout(t) for t in fake] == [layout(t) for t in other(*arguments)]


# The choice of a kernel


def like(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, device: str = "cpu") -> Tensor:
    return torch.empty(0, head_dim, dtype=dtype, device=device)


def like_on_cuda(dtype: torch.dtype, head_dim: int = 64) -> Tensor:
    with FakeTensorMode():
        return torch.empty(0, head_dim, dtype=dtype, device="cuda")


BORDERS = torch.tensor([0, 3, 7], dtype=torch.int32)
CHOICES = {
    "causal": (AttentionMask(), "sdpa"),
    "full": (AttentionMask(causal=False), "sdpa"),
    "sinks": (AttentionMask(sinks=torch.zeros(3)), "sdpa"),
    "window": (AttentionMask(window=3), "blocked"),
    "documents": (AttentionMask(cu_seqlens=BORDERS), "blocked"),
    "softcap": (AttentionMask(softcap=2.0), "blocked"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", CHOICES)
def test_auto_on_cpu(mask, dtype):
    assert select_kernel("auto", CHOICES[mask][0], like(dtype)).name == CHOICES[mask][1]


@pytest.mark.parametrize("mask", CHOICES)
@pytest.mark.parametrize("installed", [None, 2, 3])
def test_auto_on_cuda(mask, installed):
    with mock.patch.object(flash, "installed_version", return_value=installed):
        half = select_kernel("auto", CHOICES[mask][0], like_on_cuda(torch.bfloat16)).name
        odd = select_kernel("auto", CHOICES[mask][0], like_on_cuda(torch.bfloat16, 60)).name
        single = select_kernel("auto", CHOICES[mask][0], like_on_cuda(torch.float32)).name
    assert half == (CHOICES[mask][1] if installed is None else "flash")
    assert (odd, single) == ("blocked", "blocked")


def test_auto_never_takes_the_reference():
    assert select_kernel("auto", AttentionMask(softcap=2.0), like(device="meta")).name == "blocked"


@pytest.mark.parametrize("name", ["sdpa", "blocked", "reference"])
def test_explicit_choice(name):
    assert select_kernel(name, AttentionMask(), like()).name == name


def test_fake_tensor_stands_for_another_machine():
    """A trace on a laptop names the kernel of the GPU; a real tensor there is refused."""
    with FakeTensorMode():
        fake = like()
    with mock.patch.object(flash, "installed_version", return_value=None):
        assert select_kernel("flash", AttentionMask(window=5), fake).name == "flash"
        assert select_kernel("auto", AttentionMask(), fake).name == "sdpa"
        with pytest.raises(ValueError, match=r"float16 or bfloat16, not torch\.float32"):
            select_kernel("flash", AttentionMask(), fake.float())


@pytest.mark.parametrize(
    ("name", "mask", "tensor", "message"),
    [
        (
            "flash",
            "causal",
            like(torch.float64),
            "it needs float16 or bfloat16, not torch.float64; choose auto",
        ),
        ("flash", "causal", like(), "it runs on cuda, not cpu; choose auto or sdpa, blocked, reference"),
        ("flash", "causal", like(head_dim=60), "head_dim must be a multiple of 8 up to 256, not 60"),
        ("flash", "causal", like(head_dim=264), "head_dim must be a multiple of 8 up to 256, not 264"),
        ("sdpa", "window", like(), "it covers causal and full attention, not window; choose auto or blocked"),
        ("sdpa", "documents", like(), "it covers causal and full attention, not cu_seqlens; choose auto or blocked"),
        ("sdpa", "softcap", like(), "it covers causal and full attention, not softcap; choose auto or blocked"),
        ("sdpa", "causal", like(device="meta"), "it runs on cpu and cuda, not meta; choose auto or blocked"),
        ("sdpa", "causal", like_on_cuda(torch.float32), "on cuda it needs float16 or bfloat16, not torch.float32"),
        (
            "sdpa",
            "causal",
            like_on_cuda(torch.float16, 12),
            "on cuda head_dim must be a multiple of 8 up to 256, not 12",
        ),
        ("blocked", "causal", like(torch.int64), "torch.int64 is not a floating dtype"),
        ("reference", "causal", like(torch.int64), "torch.int64 is not a floating dtype"),
    ],
)
def test_refusals(name, mask, tensor, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'kernel={name!r} cannot do this: {message}')}"):
        select_kernel(name, CHOICES[mask][0], tensor)


def test_flash_that_is_not_installed_says_how_to_install_it():
    request = flash.Request(AttentionMask(), torch.bfloat16, torch.device("cuda"), 64, fake=False)
    with mock.patch.object(flash, "installed_version", return_value=None):
        assert flash.KERNEL.refuses(request) == "flash-attn is not installed; pip install 'upipe[flash]'"
    with mock.patch.object(flash, "installed_version", return_value=3):
        assert flash.KERNEL.refuses(request) is None


def test_unknown_kernel_and_dtype():
    with pytest.raises(
        ValueError, match=r"^kernel='triton' is not known; choose auto, flash, sdpa, blocked, reference$"
    ):
        select_kernel("triton", AttentionMask(), like())
    with pytest.raises(ValueError, match=r"^no kernel covers torch\.int32 on cpu; use a floating dtype$"):
        select_kernel("auto", AttentionMask(), like(torch.int32))


def test_choice_of_auto_is_logged_once(caplog):
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="upipe"):
        for _ in range(3):
            select_kernel("auto", AttentionMask(), like(torch.float32))
            select_kernel("blocked", AttentionMask(), like(torch.float32))
        select_kernel("auto", AttentionMask(window=2), like(torch.float32))
    assert [record.getMessage() for record in caplog.records] == [
        "attention kernel: sdpa (torch.float32 on cpu)",
        "attention kernel: blocked (torch.float32 on cpu)",
    ]


# Workspace


def test_declared_workspace():
    """B = 2, T = 8, H = 6, K = 3, D = 4 in bf16: q has 384 elements, k 192, a score matrix 768."""
    problem = Problem(tokens=8, head_dim=4, strided=False)
    assert (make(problem).q.numel(), make(problem).k.numel()) == (384, 192)
    found = {
        name: [workspace_bytes(op._opoverload, args, {}) for op, args in op_arguments(kernel, problem, torch.bfloat16)]
        for name, kernel in BY_NAME.items()
    }
    assert found == {
        "flash": [0, 384 * 4 + 2 * 96 * 4 + 2 * 192 * 4],
        "sdpa": [0, 0],
        "blocked": [4 * (2 * 768 + 2 * 192), 4 * (4 * 768 + 2 * 192) + 4 * 2 * 192],
        "reference": [4 * 3 * 768, 4 * 5 * 768],
    }
    assert workspace_bytes(torch.ops.aten.mm.default, (1, 2), {}) == 0


def test_workspace_on_cuda():
    with FakeTensorMode():
        q, k = (torch.empty(1, 8, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (6, 3))
        op = BY_NAME["sdpa"].backward_op._opoverload
        grouped, plain = (workspace_bytes(op, (q, q, kv, kv, q, None, True), {}) for kv in (k, q))
    assert plain == 4 * 768 + 4 * 48
    assert grouped == plain + 2 * 2 * 768


class PeakBytes(TorchDispatchMode):
    """The largest sum of bytes in storages made under the mode and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in inputs:
                self._alive.add(value.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return result


@pytest.mark.parametrize("rows", [3, 48])
@pytest.mark.parametrize("name", ["blocked", "reference"])
def test_declared_workspace_is_what_is_allocated(name, rows):
    problem = Problem(tokens=48, heads=8, kv_heads=2, head_dim=8, strided=False)
    with mock.patch.object(blocked, "SCORE_BYTES", rows * 4 * 2 * 8 * 48):
        for op, arguments in op_arguments(BY_NAME[name], problem, torch.bfloat16):
            declared = workspace_bytes(op._opoverload, arguments, {})
            with PeakBytes() as seen:
                results = op._init_fn(*arguments)
            measured = seen.peak - sum(t.nbytes for t in results)
            assert 0.8 * measured <= declared <= 1.2 * measured, (op, declared, measured)


# flash-attn through stand-ins: the real signatures, numbers from a dense mask in flash-attn's own convention


def flash_mask(length: int, causal: bool, left: int, right: int) -> Tensor:
    """Query i sees keys from i - left to i + right; -1 is no border, causal is right = 0."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = torch.ones(length, length, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    return seen


@dataclass(frozen=True)
class FlashCall:
    """What both versions compute, in the arguments they share; a document at a time where there are borders."""

    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, borders: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor]:
        if not borders:
            logits, _, _, vr = self._logits(q, k, v)
            return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), vr), logits.logsumexp(-1)
        parts = [self.forward(*(t[None, tokens] for t in (q, k, v))) for tokens in self._documents(q, *borders)]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=-1)

    def backward(self, given: dict[str, Tensor], borders: tuple[Any, ...] = ()) -> None:
        names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
        tensors = [given[name] for name in names]
        assert given["softmax_lse"].is_contiguous()
        assert all(t.is_contiguous() for t in tensors[6:])
        if not borders:
            self._write(*tensors)
            return
        for tokens in self._documents(given["q"], *borders):
            lse = given["softmax_lse"][None, :, tokens]
            self._write(*(lse if name == "softmax_lse" else given[name][None, tokens] for name in names))

    def _write(self, dout, q, k, v, out, lse, dq, dk, dv) -> None:
        logits, capped, kr, vr = self._logits(q, k, v)
        probabilities = torch.exp(logits - lse[..., None])
        ds = torch.einsum("bqhd,bkhd->bhqk", dout, vr) - (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = ds * probabilities * self.softmax_scale
        if self.softcap:
            ds = ds * (1 - (capped / self.softcap) ** 2)
        group = (-1, q.shape[2] // k.shape[2])
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, kr))
        dk.copy_(torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, group).sum(3))
        dv.copy_(torch.einsum("bhqk,bqhd->bkhd", probabilities, dout).unflatten(2, group).sum(3))

    def _logits(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kr, vr = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        logits = torch.einsum("bqhd,bkhd->bhqk", q, kr) * self.softmax_scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        seen = flash_mask(q.shape[1], self.causal, self.window_size_left, self.window_size_right)
        return logits.masked_fill(~seen, -torch.inf), logits, kr, vr

    @staticmethod
    def _documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> list[slice]:
        assert q.dim() == 3
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        return [slice(a, b) for a, b in pairwise(cu_seqlens_q.tolist()) if b > a]


def flash_attn_2() -> dict[str, ModuleType]:
    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        call = FlashCall(softmax_scale, causal, window_size_left, window_size_right, softcap)
        out, lse = call.forward(q, k, v)
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
    ):
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        call = FlashCall(softmax_scale, causal, window_size_left, window_size_right, softcap)
        out, lse = call.forward(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        assert (dropout_p, alibi_slopes, deterministic, rng_state) == (0.0, None, False, None)
        call = FlashCall(softmax_scale, causal, window_size_left, window_size_right, softcap)
        call.backward(locals())

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        assert (dropout_p, alibi_slopes, deterministic, rng_state) == (0.0, None, False, None)
        call = FlashCall(softmax_scale, causal, window_size_left, window_size_right, softcap)
        call.backward(locals(), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))

    return {
        "flash_attn": module("flash_attn"),
        "flash_attn.flash_attn_interface": module(
            "flash_attn.flash_attn_interface",
            _flash_attn_forward,
            _flash_attn_varlen_forward,
            _flash_attn_backward,
            _flash_attn_varlen_backward,
        ),
        "flash_attn_interface": None,
    }


def flash_attn_3() -> dict[str, ModuleType]:
    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        kv_batch_idx=None,
        leftpad_k=None,
        rotary_cos=None,
        rotary_sin=None,
        seqlens_rotary=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        call = FlashCall(softmax_scale, causal, window_size_left, window_size_right, softcap)
        borders = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = call.forward(q, k, v, () if cu_seqlens_q is None else borders)
        return out, lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        assert (sequed_q, sequed_k, deterministic, sm_margin) == (None, None, False, 0)
        call = FlashCall(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        borders = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        call.backward(locals(), () if cu_seqlens_q is None else borders)

    return {"flash_attn_interface": module("flash_attn_interface", _flash_attn_forward, _flash_attn_backward)}


def module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="made here", is_package=name == "flash_attn")
    for function in functions:
        setattr(made, function.__name__, function)
    return made


FLASH = {2: flash_attn_2, 3: flash_attn_3}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("version", [2, 3])
def test_arguments_of_flash_attn(version, feature):
    with mock.patch.dict(sys.modules, FLASH[version]()):
        assert flash.installed_version() == version
        check(flash.KERNEL, FEATURES[feature])


def test_installed_version_imports_nothing():
    before = set(sys.modules)
    found = flash.installed_version()
    assert set(sys.modules) == before
    assert found == (
        3 if importlib.util.find_spec("flash_attn_interface") else 2 if importlib.util.find_spec("flash_attn") else None
    )


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check_on_cuda(kernel: Kernel, problem: Problem) -> None:
    tensors = make(problem, torch.bfloat16)
    expected = truth(problem, tensors)
    moved = {name: None if value is None else value.cuda() for name, value in vars(tensors).items()}
    ours = run(kernel, problem, Tensors(**moved))
    for name, value in ours.items():
        assert relative_error(value.cpu(), expected[name]) < 1e-2, name


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("feature", FEATURES)
def test_flash_on_cuda(feature):
    if flash.installed_version() is None:
        pytest.skip("flash-attn is not installed")
    check_on_cuda(flash.KERNEL, replace(FEATURES[feature], head_dim=64))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("feature", COVERED_BY_SDPA)
def test_sdpa_on_cuda(feature):
    check_on_cuda(BY_NAME["sdpa"], replace(FEATURES[feature], head_dim=64))
