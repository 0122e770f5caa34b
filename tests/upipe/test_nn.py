"""The modules: Hugging Face's names and numbers, what they refuse, adapters, and FSDP2.

Transformers and peft are imported where they are used: ranks import this file and need neither.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from tests.upipe.cases import shard
from upipe import AttentionMask, Projections, Rotary, UlyssesAttention, UPipeAttention, reference
from upipe.testing import assert_exact, lone_rank, relative_error, run_ranks

KINDS = [UPipeAttention, UlyssesAttention]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BATCH, TOKENS = 24, 6, 2, 8, 2, 13
GEOMETRY = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 9,
    "num_hidden_layers": 1,
    "vocab_size": 11,
    "attn_implementation": "eager",
}


def build(kind: type[UPipeAttention] = UPipeAttention, **options: Any) -> UPipeAttention:
    torch.manual_seed(0)
    layer = kind(HIDDEN, HEADS, KV_HEADS, **({"head_dim": HEAD_DIM, "group": None} | options))
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer


# Hugging Face's layers


def hugging_face(model: str, **config_options: Any) -> tuple[nn.Module, Any]:
    """A layer with random weights in fp64, and its config."""
    import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss
    import transformers.models.llama.modeling_llama as llama
    import transformers.models.qwen3.modeling_qwen3 as qwen3

    config_class, attention_class = {
        "llama": (llama.LlamaConfig, llama.LlamaAttention),
        "qwen3": (qwen3.Qwen3Config, qwen3.Qwen3Attention),
        "gpt_oss": (gpt_oss.GptOssConfig, gpt_oss.GptOssAttention),
    }[model]
    config = config_class(**GEOMETRY, **config_options)
    torch.manual_seed(1)
    layer = attention_class(config, 0).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * HIDDEN**-0.5 + ("norm" in name))
    return layer, config


def like(layer: nn.Module, config: Any, kind: type[UPipeAttention], **options: Any) -> UPipeAttention:
    names = dict(layer.named_parameters())
    ours = build(
        kind,
        qkv_bias="q_proj.bias" in names,
        o_bias="o_proj.bias" in names,
        qk_norm="q_norm.weight" in names,
        sinks="sinks" in names,
        eps=config.rms_norm_eps,
        dtype=torch.float64,
        **options,
    )
    ours.load_state_dict(layer.state_dict(), strict=True)
    return ours


def outcome(layer: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"y": y.detach(), **dict(zip(["x", *parameters], grads, strict=True))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_same_names_and_numbers_as_hugging_face(model, bias, kind):
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": 300.0, "rope_type": "default"}
    theirs, config = hugging_face(model, attention_bias=bias, rope_parameters=rope)
    ours = like(theirs, config, kind, rotary=Rotary(300.0, HEAD_DIM))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, dy = torch.randn(2, BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    positions = torch.stack([torch.arange(TOKENS), 3 * torch.arange(TOKENS) + 1])
    embedding = LlamaRotaryEmbedding(config)
    mask = create_causal_mask(config=config, inputs_embeds=x, attention_mask=None, cache=None)
    x_theirs, x_ours = (x.clone().requires_grad_() for _ in range(2))
    expected = outcome(theirs, x_theirs, theirs(x_theirs, embedding(x, positions), mask)[0], dy)
    found = outcome(ours, x_ours, ours(x_ours, positions=positions), dy)
    assert set(found) == set(expected)
    for name, value in found.items():  # Hugging Face: rotary tables, norms and softmax in fp32
        assert_exact(value, expected[name], name, tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_and_window_are_those_of_gpt_oss(kind):
    from transformers.masking_utils import create_sliding_window_causal_mask

    theirs, config = hugging_face("gpt_oss", attention_bias=True, sliding_window=4, layer_types=["sliding_attention"])
    ours = like(theirs, config, kind, mask=AttentionMask(window=4))
    assert set(ours.state_dict()) == set(theirs.state_dict())
    x, dy = torch.randn(2, BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    mask = create_sliding_window_causal_mask(config=config, inputs_embeds=x, attention_mask=None, cache=None)
    no_rotation = torch.ones(BATCH, TOKENS, HEAD_DIM // 2).double(), torch.zeros(BATCH, TOKENS, HEAD_DIM // 2).double()
    x_theirs, x_ours = (x.clone().requires_grad_() for _ in range(2))
    expected = outcome(theirs, x_theirs, theirs(x_theirs, no_rotation, mask)[0], dy)
    found = outcome(ours, x_ours, ours(x_ours), dy)
    for name, value in found.items():
        assert_exact(value, expected[name], name, tolerance=1e-10)


def test_state_dict_does_not_depend_on_the_schedule():
    states = [build(heads_per_stage=u, qk_norm=True, sinks=True).state_dict() for u in (1, 3, 6)]
    states.append(build(UlyssesAttention, qk_norm=True, sinks=True).state_dict())
    for state in states[1:]:
        assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in states[0].items()}
        assert all(torch.equal(state[name], states[0][name]) for name in state)


# The constructor


EVERY_OPTION = {
    "head_dim": 4,
    "group": None,
    "heads_per_stage": 6,
    "rotary": Rotary(50.0, 4),
    "mask": AttentionMask(window=3, softcap=2.0),
    "scale": 0.3,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": True,
    "eps": 1e-4,
    "sinks": True,
    "dropout": 0.0,
    "kernel": "blocked",
    "keep_attention": False,
    "device": "cpu",
    "dtype": torch.float64,
}


def test_one_constructor_for_both():
    upipe, ulysses = (build(kind, **EVERY_OPTION) for kind in KINDS)
    ulysses.load_state_dict(upipe.state_dict())
    assert {name: p.dtype for name, p in upipe.named_parameters()} == dict.fromkeys(upipe.state_dict(), torch.float64)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    assert_exact(upipe(x).detach(), ulysses(x).detach(), "y")


@pytest.mark.parametrize("option", ["scale", "mask", "rotary", "eps"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_an_effect(kind, option):
    other = {"scale": None, "mask": None, "rotary": Rotary(60.0, 4), "eps": 0.5}[option]
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    first, second = build(kind, **EVERY_OPTION), build(kind, **(EVERY_OPTION | {option: other}))
    assert relative_error(first(x).detach(), second(x).detach()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_option_is_a_type_error(kind):
    with pytest.raises(TypeError, match="attention_dropout"):
        build(kind, attention_dropout=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((20, 6, 2), {"dropout": 0.1}, "dropout=0.1 is not supported: it would change the recompute; use dropout=0"),
        ((20, 6, 4), {"head_dim": 8}, "num_heads=6 must be a multiple of num_kv_heads=4; valid KV heads: 1, 2, 3, 6"),
        ((20, 6, 2), {}, "hidden_size=20 is no multiple of num_heads=6; pass head_dim"),
        ((20, 0, 2), {}, "num_heads=0 must be at least 1"),
        ((20, 6, 0), {"head_dim": 8}, "num_kv_heads=0 must be at least 1"),
        ((20, 6, 2), {"head_dim": 8, "heads_per_stage": 7}, "heads_per_stage=7 must be a multiple of 1"),
        (
            (20, 6, 2),
            {"head_dim": 8, "rotary": Rotary(9.0, 6)},
            "rotary is for head_dim=6 but the layer has head_dim=8",
        ),
        ((20, 6, 2), {"head_dim": 8, "mask": AttentionMask(sinks=torch.ones(6))}, "mask may hold neither sinks"),
        (
            (20, 6, 2),
            {"head_dim": 8, "mask": AttentionMask(cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))},
            "mask may hold neither sinks (pass sinks=True, the layer owns them) nor cu_seqlens (pass them to forward)",
        ),
    ],
)
def test_constructor_refuses(kind, arguments, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        kind(*arguments, group=None, **options)


def test_ulysses_refuses_what_has_no_effect_in_it():
    with pytest.raises(ValueError, match=r"^heads_per_stage=2 has no effect in UlyssesAttention.* all 6 heads"):
        build(UlyssesAttention, heads_per_stage=2)
    with pytest.raises(ValueError, match=r"^keep_attention=True has no effect in UlyssesAttention"):
        build(UlyssesAttention, keep_attention=True)
    build(UlyssesAttention, heads_per_stage=HEADS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_group_beside_torch_distributed_is_refused(kind):
    layer, x = build(kind), torch.randn(BATCH, TOKENS, HIDDEN)
    with lone_rank() as group:
        with pytest.raises(ValueError, match=r"^group=None means this process alone, but torch.distributed is init"):
            build(kind)
        with pytest.raises(ValueError, match=r"^group=None means this process alone"):
            layer(x)
        assert torch.equal(build(kind, group=group)(x), build(kind, group=group)(x))


def refuse_heads_per_stage() -> None:
    with pytest.raises(ValueError, match=r"^heads_per_stage=3 must be a multiple of 2 .* valid for 6 heads: 2, 4, 6$"):
        build(group=dist.group.WORLD, heads_per_stage=3)


def refuse_a_group_of_others() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match=r"^this process is not a member of `group`"):
        build(group=groups[1 - dist.get_rank()])


@pytest.mark.parametrize("refuse", [refuse_heads_per_stage, refuse_a_group_of_others])
def test_refusals_that_need_ranks(refuse):
    run_ranks(refuse, 2)


# The call


BORDERS = torch.tensor([0, 5, TOKENS], dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "call", "message"),
    [
        (torch.ones(TOKENS, HIDDEN), {}, "must be [B, S, "),
        (torch.ones(1, 1, TOKENS, HIDDEN), {}, "must be [B, S, "),
        (torch.ones(1, TOKENS, HIDDEN), {"positions": torch.arange(TOKENS)}, "positions are used by rotary only"),
        (
            torch.ones(1, TOKENS, HIDDEN),
            {"cu_seqlens": torch.tensor([0, 4, 12], dtype=torch.int32)},
            "cu_seqlens ends at 12 but the whole sequence has 13 tokens",
        ),
        (torch.ones(2, TOKENS, HIDDEN), {"cu_seqlens": BORDERS}, "cu_seqlens needs batch size 1, got 2; pack the rows"),
        (torch.ones(1, TOKENS, HIDDEN), {"cu_seqlens": BORDERS.long()}, "cu_seqlens must be int32 [documents + 1]"),
        (
            torch.ones(1, TOKENS, HIDDEN),
            {"cu_seqlens": torch.tensor([0, 9, 5, 13], dtype=torch.int32)},
            "cu_seqlens must start at 0 and never fall",
        ),
    ],
)
def test_call_refuses(kind, x, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind)(x, **call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(TOKENS - 1),
        torch.arange(1),
        torch.arange(TOKENS).expand(3, -1),
        torch.arange(TOKENS).float(),
        torch.arange(TOKENS).expand(1, 1, -1),
    ],
    ids=["one short", "a single one", "another batch", "float", "three dims"],
)
def test_positions_that_do_not_fit_are_refused(kind, positions):
    layer = build(kind, rotary=Rotary(50.0, HEAD_DIM))
    with pytest.raises(ValueError, match="positions"):
        layer(torch.ones(BATCH, TOKENS, HIDDEN), positions=positions)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_wrong_dtype_and_device_are_refused_by_name(name):
    layer = build(qkv_bias=True)
    setattr(layer, name, getattr(layer, name).double())
    with pytest.raises(ValueError, match=rf"^{name[0]} is torch\.float64 but x is torch\.float32; convert one of them"):
        layer(torch.ones(1, TOKENS, HIDDEN))
    setattr(layer, name, getattr(layer, name).float().to("meta"))
    with pytest.raises(ValueError, match=f"^{name[0]} is on meta but x is on cpu; move one of them$"):
        layer(torch.ones(1, TOKENS, HIDDEN))


def test_wrong_hidden_size_is_refused():
    with pytest.raises(ValueError, match=r"^q has shape \[48, 24\] but \[48, 25\] is needed"):
        build()(torch.ones(1, TOKENS, HIDDEN + 1))


# Adapters


def with_lora(kind: type[UPipeAttention], *targets: str) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=list(targets), init_lora_weights=False)
    return peft.inject_adapter_in_model(config, nn.ModuleDict({"attn": build(kind, dtype=torch.float64)}))["attn"]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_upipe_refuses_an_adapter_by_name(name):
    layer = with_lora(UPipeAttention, name)
    with pytest.raises(
        ValueError, match=rf"^{name} is a peft\S+\.Linear, whose forward is not that of nn.Linear and would be"
    ):
        layer(torch.ones(1, TOKENS, HIDDEN, dtype=torch.float64))


def test_ulysses_trains_an_adapter():
    layer = with_lora(UlyssesAttention, "q_proj", "o_proj")
    x, dy = torch.randn(2, BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    layer(x).backward(dy)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters() if "lora" in name}
    assert len(grads) == 4
    assert all(grad.abs().max() > 1e-3 for grad in grads.values())
    merged = build(dtype=torch.float64)
    state = {name.replace(".base_layer", ""): t for name, t in layer.state_dict().items() if "lora" not in name}
    for name in ("q_proj", "o_proj"):
        state[f"{name}.weight"] = state[f"{name}.weight"] + getattr(layer, name).get_delta_weight("default")
    merged.load_state_dict(state)
    assert_exact(layer(x).detach(), merged(x).detach(), "y")


def test_upipe_refuses_a_forward_put_on_the_instance():
    """How some libraries wrap a Linear: the class stays, its forward goes."""
    layer = build()
    layer.q_proj.forward = lambda x: nn.Linear.forward(layer.q_proj, x) * 0
    with pytest.raises(ValueError, match=r"^q_proj"):
        layer(torch.ones(1, TOKENS, HIDDEN))


def test_upipe_refuses_hooks_that_would_not_run():
    layer = build()
    layer.v_proj.register_forward_hook(lambda module, args, out: out * 0)
    with pytest.raises(ValueError, match=r"^v_proj"):
        layer(torch.ones(1, TOKENS, HIDDEN))


def test_parametrised_weight_is_trained():
    """The weight is an ordinary tensor to the layer; a reparametrisation sees its gradient."""
    layer = build(dtype=torch.float64)
    x, dy = torch.randn(2, 1, TOKENS, HIDDEN, dtype=torch.float64)
    layer(x).backward(dy)
    plain = layer.k_proj.weight.grad

    class Negated(nn.Module):
        def forward(self, weight):
            return -weight

        def right_inverse(self, weight):
            return -weight

    nn.utils.parametrize.register_parametrization(layer.k_proj, "weight", Negated())
    layer(x).backward(dy)
    assert_exact(layer.k_proj.parametrizations.weight.original.grad, -plain, "k")


# FSDP2


class Block(nn.Module):
    """The attention layer below a root, so that its weights are gathered anew for backward."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.attention(x)


def sharded_gradients(kind: type[UPipeAttention], keep_attention: bool, calls: int) -> None:
    group = dist.group.WORLD
    options = {"keep_attention": True} if keep_attention else {}
    attention = build(
        kind, group=group, rotary=Rotary(50.0, HEAD_DIM), qkv_bias=True, sinks=True, dtype=torch.float64, **options
    )
    weights = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in zip(Projections.tensor_names(), attention.projections().tensors(), strict=True)
        if tensor is not None
    }
    sinks = attention.sinks.detach().clone().requires_grad_()
    x, dy = torch.randn(2, calls, BATCH, group.size() * TOKENS, HIDDEN, dtype=torch.float64)
    model = Block(attention)
    mesh = init_device_mesh("cpu", (group.size(),))
    for module in (model.attention, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    truth = [torch.zeros_like(t) for t in (*weights.values(), sinks)]
    for one, upstream in zip(x, dy, strict=True):
        whole, mine = one.clone().requires_grad_(), shard(one, group).requires_grad_()
        expected = reference.attention_layer(
            whole, weights, num_heads=HEADS, num_kv_heads=KV_HEADS, theta=50.0, sinks=sinks
        )
        dx, *grads = torch.autograd.grad(expected, [whole, *weights.values(), sinks], upstream)
        truth = [total + grad for total, grad in zip(truth, grads, strict=True)]
        y = model(mine)
        assert_exact(y.detach(), shard(expected.detach(), group), "y")
        assert not any(p.untyped_storage().nbytes() for p in gathered(attention)), "weights stay gathered"
        y.backward(shard(upstream, group))
        assert_exact(mine.grad, shard(dx, group), "x")
    found = [attention.get_parameter(PARAMETERS[name]).grad.full_tensor() for name in weights]
    found.append(attention.sinks.grad.full_tensor())
    for name, grad, expected in zip([*weights, "sinks"], found, truth, strict=True):
        assert_exact(grad, expected, name)


PARAMETERS = {
    f"{n}{suffix}": f"{n}_proj.{attr}" for n in "qkvo" for suffix, attr in (("", "weight"), ("_bias", "bias"))
}


def gathered(module: nn.Module) -> list[Tensor]:
    """The unsharded weights that FSDP2 keeps between its uses, with or without storage."""
    return [
        tensor
        for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params
        for tensor in [parameter._unsharded_param]
    ]


@pytest.mark.parametrize(
    ("kind", "keep_attention"), [(UPipeAttention, False), (UPipeAttention, True), (UlyssesAttention, False)]
)
def test_gradients_under_fsdp2(kind, keep_attention):
    run_ranks(sharded_gradients, 2, kind, keep_attention, 2)


def wrapped_too_far_down() -> None:
    layer = build(group=dist.group.WORLD)
    fully_shard(layer.k_proj, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"^k_proj is still sharded; wrap the attention layer or its block"):
        layer(torch.ones(1, TOKENS, HIDDEN))


def test_sharded_linears_are_refused():
    run_ranks(wrapped_too_far_down, 2)


def refuse_empty_input() -> None:
    """In a process of its own: some kernels divide by the number of tokens and take the process with them."""
    for kind in KINDS:
        for kernel in ("blocked", "auto"):
            layer = build(kind, kernel=kernel, group=dist.group.WORLD)
            for shape in ((0, TOKENS), (1, 0)):
                with pytest.raises(ValueError, match=r"^x must "):
                    layer(torch.ones(*shape, HIDDEN))


def test_empty_input_is_refused():
    run_ranks(refuse_empty_input, 1)
