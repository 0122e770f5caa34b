import copy
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from upipe.rotary import Rotary, rotate, rotate_transposed
from upipe.testing import assert_exact, relative_error

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FAR = [0, 1, 7, 2**20 + 3, 2**23 - 1, 2**23, 2**23 + 1, 2**25 + 11]


def exact_tables(theta: int, rotary_dim: int, positions: list[int]) -> tuple[Tensor, Tensor]:
    """cos and sin with angles of 60 digits, reduced to half a turn before they become floats."""
    with localcontext() as context:
        context.prec = 60
        rows = []
        for position in positions:
            row = []
            for pair in range(rotary_dim // 2):
                angle = Decimal(position) * Decimal(theta) ** (Decimal(-2 * pair) / Decimal(rotary_dim))
                row.append(float(angle - 2 * PI * (angle / (2 * PI)).to_integral_value()))
            rows.append(row)
    cos = [[math.cos(angle) for angle in row] for row in rows]
    sin = [[math.sin(angle) for angle in row] for row in rows]
    return torch.tensor(cos, dtype=torch.float64), torch.tensor(sin, dtype=torch.float64)


def check_far_positions(tables, theta: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """Hold tables to half a unit in the last place of 1, plus what fp64 angles allow."""
    got = tables(torch.tensor(FAR), dtype)
    half_unit = torch.finfo(dtype).eps / 4
    bound = half_unit + 4e-16 * torch.tensor(FAR, dtype=torch.float64)[:, None] + 2e-16
    for name, value, truth in zip(("cos", "sin"), got, exact_tables(theta, rotary_dim, FAR), strict=True):
        assert value.dtype == dtype
        worst = ((value.double() - truth).abs() - bound).max()
        assert worst <= 0, f"{name} is off by {worst:.2e} more than allowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("theta", "rotary_dim"), [(10_000, 24), (500_000, 128), (1_000_000, 64)])
def test_tables_are_exact_at_millions_of_tokens(theta, rotary_dim, dtype):
    check_far_positions(Rotary(float(theta), rotary_dim).tables, theta, rotary_dim, dtype)


def test_fp32_angles_fail_the_same_check():
    def tables_in_fp32(positions, dtype):
        frequencies = torch.tensor(Rotary(500_000.0, 128).inverse_frequencies, dtype=torch.float32)
        angles = positions.float()[:, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    with pytest.raises(AssertionError, match="off by"):
        check_far_positions(tables_in_fp32, 500_000, 128, torch.float32)


def test_positions_by_row_and_integer_dtypes():
    rotary = Rotary(10_000.0, 8)
    positions = torch.tensor([[3, 4, 5], [0, 9, 2]])
    cos, sin = rotary.tables(positions)
    assert cos.shape == sin.shape == (2, 3, 4)
    for row in range(2):
        narrow_cos, narrow_sin = rotary.tables(positions[row].int())
        assert torch.equal(cos[row], narrow_cos)
        assert torch.equal(sin[row], narrow_sin)


def hf_parameters(theta, head_dim, part, scaling):
    llama = pytest.importorskip("transformers.models.llama")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta, "partial_rotary_factor": part},
    )
    frequencies, factor = rope.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    return frequencies, factor, config.rope_parameters


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0},
    "qwen": YARN,
    "gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "deepseek": {
        "rope_type": "yarn",
        "factor": 40,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "beta_fast": 28,
        "beta_slow": 2,
        "original_max_position_embeddings": 4096,
    },
    "wide ramp": {**YARN, "beta_fast": 256, "beta_slow": 0.1, "original_max_position_embeddings": 4096},
    "attention_factor": {**YARN, "attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim", "part"), [(500_000.0, 128, 1.0), (10_000.0, 96, 0.5), (50.0, 32, 1.0)])
def test_frequencies_and_attention_factor_are_those_of_hugging_face(name, theta, head_dim, part):
    frequencies, factor, whole = hf_parameters(theta, head_dim, part, SCALINGS[name])
    # What Hugging Face stores in a config, with theta and the rotated part, is accepted as it is.
    rotary = Rotary(theta, head_dim, rotary_dim=int(head_dim * part), scaling=whole)
    assert len(rotary.inverse_frequencies) == rotary.num_pairs == len(frequencies)
    torch.testing.assert_close(torch.tensor(rotary.inverse_frequencies).float(), frequencies, rtol=2e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-12)


def test_scaling_changes_what_it_should():
    plain = Rotary(500_000.0, 128).inverse_frequencies
    assert plain == Rotary(500_000.0, 128, scaling={"rope_type": "default"}).inverse_frequencies
    for scaling in (LLAMA3, YARN):
        scaled = Rotary(500_000.0, 128, scaling=scaling).inverse_frequencies
        assert scaled[0] == plain[0]
        assert scaled[-1] == pytest.approx(plain[-1] / scaling["factor"], rel=1e-15)


def test_the_attention_factor_multiplies_the_tables():
    rotary = Rotary(10_000.0, 16, scaling={**YARN, "attention_factor": 1.5})
    cos, sin = rotary.tables(torch.arange(5), torch.float64)
    assert_exact(cos.square() + sin.square(), torch.full((5, 8), 2.25, dtype=torch.float64), "norm", tolerance=1e-14)


def test_scaling_is_not_written_and_none_is_absent():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": None}
    before = copy.deepcopy(scaling)
    rotary = Rotary(10_000.0, 16, scaling=scaling)
    rotary.tables(torch.arange(3))
    assert scaling == before
    assert rotary.attention_factor == Rotary(10_000.0, 16, scaling=YARN).attention_factor
    assert len({rotary, copy.copy(rotary)}) == 2  # hashed by identity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"theta": 1.0}, "theta=1.0 must be above 1"),
        ({"head_dim": 7}, "rotary_dim=7 must be even"),
        ({"rotary_dim": 10}, "rotary_dim=10 must be even and from 2 to head_dim=8"),
        ({"rotary_dim": 0}, "rotary_dim=0"),
        ({"scaling": {}}, "must name one rope_type of default, linear, llama3, yarn"),
        ({"scaling": {"factor": 2.0}}, "must name one rope_type"),
        ({"scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "type='yarn'"),
        ({"scaling": {"rope_type": "default", "factor": 2.0}}, 'rope_type "default" has no factor; valid: rope_type'),
        ({"scaling": {**YARN, "mrope_section": [1]}}, "has no mrope_section"),
        ({"scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor, original_max"),
        ({"scaling": {**YARN, "factor": None}}, "needs factor"),
        ({"scaling": {**YARN, "factor": 0.5}}, "factor=0.5 in rope_scaling must be a number, 1 or more"),
        ({"scaling": {**YARN, "factor": "4"}}, "factor='4'"),
        ({"scaling": {**YARN, "beta_fast": True}}, "beta_fast=True in rope_scaling must be a number above 0"),
        ({"scaling": {**YARN, "attention_factor": math.nan}}, "attention_factor=nan"),
        ({"scaling": {**YARN, "truncate": 1}}, "truncate=1 in rope_scaling must be true or false"),
        ({"scaling": {**YARN, "beta_slow": 40}}, "beta_fast=32.0 must be above beta_slow=40"),
        ({"scaling": {**YARN, "mscale": 1.0}}, "mscale in rope_scaling has no effect alone"),
        ({"scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
        ({"scaling": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta=5.0 in rope_scaling must equal theta"),
        ({"scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "pass rotary_dim=4"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Rotary(**{"theta": 10_000.0, "head_dim": 8, **arguments})


def random_case(rotary_dim: int, by_row: bool, dtype: torch.dtype = torch.float64, scaling=None):
    torch.manual_seed(3)
    batch, tokens, heads, head_dim = 2, 5, 3, 8
    x = torch.randn(batch, tokens, heads, head_dim, dtype=torch.float64).to(dtype)
    positions = torch.randint(0, 2**23, (batch, tokens) if by_row else (tokens,))
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return x, *Rotary(10_000.0, head_dim, rotary_dim, scaling).tables(positions, table_dtype)


def hugging_face_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb on the rotated dims, the others concatenated, as its models do."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = (torch.cat([table, table], dim=-1).expand(*x.shape[:2], -1) for table in (cos, sin))
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([modeling.apply_rotary_pos_emb(rotated, rotated, cos, sin, unsqueeze_dim=2)[0], passed], dim=-1)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotate_is_that_of_hugging_face(rotary_dim, by_row):
    x, cos, sin = random_case(rotary_dim, by_row)
    before = x.clone()
    out = rotate(x, cos, sin)
    assert_exact(out, hugging_face_rotation(x, cos, sin), "rotate", tolerance=1e-14)
    assert out.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_gradients(rotary_dim):
    x, cos, sin = random_case(rotary_dim, by_row=True, scaling={**YARN, "attention_factor": 1.5})
    upstream = torch.randn(x.shape, dtype=torch.float64)
    for function, transposed in ((rotate, rotate_transposed), (rotate_transposed, rotate)):
        leaf = x.clone().requires_grad_()
        torch.autograd.gradcheck(lambda t, f=function: f(t, cos, sin), leaf)
        torch.autograd.gradgradcheck(lambda t, f=function: f(t, cos, sin), leaf)
        (grad,) = torch.autograd.grad(function(leaf, cos, sin), leaf, upstream)
        assert torch.equal(grad, transposed(upstream, cos, sin))
    # The gradient of the plain formula, differentiated by autograd.
    leaf = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(hugging_face_rotation(leaf, cos, sin), leaf, upstream)
    assert_exact(rotate_transposed(upstream, cos, sin), truth, "vjp", tolerance=1e-14)


def test_bf16_is_rounded_once_forward_and_backward():
    x, cos, sin = random_case(8, by_row=False, dtype=torch.bfloat16)
    upstream = torch.randn(x.shape).bfloat16()
    x.requires_grad_()
    out = rotate(x, cos, sin)
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out, x, upstream)
    for name, value, truth in (
        ("out", out, rotate(x.detach().float(), cos, sin)),
        ("grad", grad, rotate_transposed(upstream.float(), cos, sin)),
    ):
        assert torch.equal(value, truth.bfloat16()), name
    # Rounding each term, as autograd of the plain formula does, is caught by that equality.
    leaf = x.detach().requires_grad_()
    (plain,) = torch.autograd.grad(hugging_face_rotation(leaf, cos.bfloat16(), sin.bfloat16()), leaf, upstream)
    assert not torch.equal(plain, rotate_transposed(upstream.float(), cos, sin).bfloat16())
    assert relative_error(plain, grad) < 0.02


def test_strided_input_no_heads_and_fake_tensors():
    x, cos, sin = random_case(8, by_row=False)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rotate(strided, cos, sin), rotate(x, cos, sin))
    assert rotate(x[:, :, :0], cos, sin).shape == (2, 5, 0, 8)
    with FakeTensorMode():
        cos, sin = Rotary(10_000.0, 8).tables(torch.arange(5))
        out = rotate(torch.empty(2, 5, 3, 8, dtype=torch.bfloat16), cos, sin)
    assert out.shape == (2, 5, 3, 8)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, cos, sin: (x[0], cos, sin), r"x must be a floating tensor \[B, S, heads, D\]; got .* \[5, 3, 8\]"),
        (lambda x, cos, sin: (x.long(), cos, sin), "x must be a floating tensor"),
        (lambda x, cos, sin: (x, cos[:4], sin[:4]), r"must be \[5, R/2\] or \[2, 5, R/2\].*got \[4, 4\]"),
        (lambda x, cos, sin: (x, cos, sin[..., :3]), r"got \[5, 4\] and \[5, 3\]"),
        (lambda x, cos, sin: (x[..., :6], cos, sin), "R at most 6"),
        (lambda x, cos, sin: (x, cos.bfloat16(), sin.bfloat16()), "cos and sin are float32 or float64"),
        (lambda x, cos, sin: (x, cos.float(), sin), "one dtype"),
        (lambda x, cos, sin: (x, cos.requires_grad_(), sin), "detach"),
    ],
)
def test_what_rotate_refuses(change, message):
    for function in (rotate, rotate_transposed):
        with pytest.raises(ValueError, match=message):
            function(*change(*random_case(8, by_row=False)))


def test_what_tables_refuses():
    rotary = Rotary(10_000.0, 8)
    with pytest.raises(ValueError, match="positions must be integers"):
        rotary.tables(torch.arange(3.0))
    with pytest.raises(ValueError, match=r"positions must be \[S\] or \[B, S\]; got \[1, 1, 3\]"):
        rotary.tables(torch.arange(3)[None, None])
    with pytest.raises(ValueError, match="float32 or float64"):
        rotary.tables(torch.arange(3), torch.bfloat16)
