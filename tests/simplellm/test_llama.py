"""The model against transformers' Llama, its stages against the whole, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.small_models import enliven
from torch import Tensor, nn

from simplellm import attention, blocks, layers, mixed_precision
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage, LLamaStage
from simplellm.losses import causalLLMLoss

pytestmark = pytest.mark.quick

VOCAB_SIZE = 50
SIZES: dict[str, Any] = {"dmodel": 24, "num_heads": 4, "n_layers": 4, "ctx_size": 16}


def tokens(batch: int = 3, seq: int = 11) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch, seq), generator=torch.Generator().manual_seed(5))


def whole(**options: Any) -> CausalLLama:
    model = LLama(CausalLLama, VOCAB_SIZE, **{**SIZES, **options})
    enliven(model)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        found[name] = parameter.grad
    return found


# ---------------------------------------------------------------------------------------------- against transformers


def transformers_llama(attention: str, theta: float, eps: float, num_kv_heads: int, hidden_dim: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SIZES["dmodel"],
        "intermediate_size": hidden_dim,
        "num_hidden_layers": SIZES["n_layers"],
        "num_attention_heads": SIZES["num_heads"],
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": SIZES["ctx_size"],
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        "attn_implementation": attention,
    }
    return LlamaForCausalLM(LlamaConfig(**settings))


@pytest.mark.parametrize(
    ("attention", "theta", "eps", "num_kv_heads", "hidden_dim", "batch", "seq"),
    [
        ("sdpa", 1e4, 1e-6, 4, 96, 3, 11),
        ("eager", 1e4, 1e-6, 4, 96, 2, 16),
        ("sdpa", 10.0, 1e-6, 2, 96, 1, 13),
        ("eager", 1e4, 1e-2, 1, 40, 5, 7),
    ],
)
def test_it_is_transformers_llama(
    attention: str, theta: float, eps: float, num_kv_heads: int, hidden_dim: int, batch: int, seq: int
) -> None:
    theirs = transformers_llama(attention, theta, eps, num_kv_heads, hidden_dim)
    ours = whole(rope_theta=theta, norm_eps=eps, num_kv_heads=num_kv_heads, hidden_dim=hidden_dim)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ids = tokens(batch, seq)

    logits = ours(ids)
    loss = causalLLMLoss(logits, ids, VOCAB_SIZE)
    loss.backward()
    expected = theirs(ids, labels=ids, use_cache=False)
    expected.loss.backward()

    assert logits.std() > 0.5  # predictions that differ
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- in stages


def build_stages(layers: list[int], **options: Any) -> list[nn.Module]:
    """A pipeline whose stages hold `layers` layers each, with the weights of `whole`."""
    options = {**SIZES, **options}
    stages: list[nn.Module] = []
    for number, n_layers in enumerate(layers):
        options |= {"n_layers": n_layers, "first_layer": sum(layers[:number])}
        if number == 0:
            stages.append(LLamaFirstStage(VOCAB_SIZE, **options))
        elif number == len(layers) - 1:
            stages.append(LLamaLastStage(VOCAB_SIZE, **options))
        else:
            stages.append(LLamaStage(**options))
    return stages


def take_weights(stages: list[nn.Module], model: nn.Module) -> None:
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()}, strict=True)


@pytest.mark.parametrize("layers", [[1, 2, 1], [2, 2], [0, 4, 0], [1, 0, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_are_the_whole_model(layers: list[int], dtype: torch.dtype) -> None:
    model = LLama(CausalLLama, VOCAB_SIZE, **SIZES, dtype=dtype)
    stages = build_stages(layers, dtype=dtype)
    joined: dict[str, Tensor] = {}
    for stage in stages:
        assert not joined.keys() & stage.state_dict().keys()
        joined |= stage.state_dict()
    assert joined.keys() == model.state_dict().keys()
    torch.testing.assert_close(joined, dict(model.state_dict()), rtol=0, atol=0)

    enliven(model)
    take_weights(stages, model)
    ids = tokens()
    logits = model(ids)
    causalLLMLoss(logits, ids, VOCAB_SIZE).backward()

    received: list[Tensor] = [ids]
    sent: list[Tensor] = []
    for stage in stages:
        sent.append(stage(received[-1]))
        assert sent[-1].dtype == torch.float32
        assert sent[-1].is_contiguous()
        received.append(sent[-1].detach().requires_grad_())
    torch.testing.assert_close(received[-1], logits, rtol=0, atol=0)
    causalLLMLoss(received[-1], ids, VOCAB_SIZE).backward()
    for activations, above in zip(reversed(sent), reversed(received), strict=False):
        activations.backward(above.grad)

    joined_gradients = {name: grad for stage in stages for name, grad in gradients(stage).items()}
    torch.testing.assert_close(joined_gradients, gradients(model), rtol=0, atol=1e-7)


@pytest.mark.parametrize("n_layers", [0, 1])
def test_what_a_stage_sends_is_contiguous(n_layers: int) -> None:
    stage = LLamaStage(**SIZES | {"n_layers": n_layers})
    activations = torch.ones(11, 3, 24).transpose(0, 1)
    assert not activations.is_contiguous()
    assert stage(activations).is_contiguous()


def test_by_default_a_stage_holds_the_layers_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(stage: nn.Module) -> set[str]:
        return {name.split(".")[2] for name in stage.state_dict() if ".layers." in name}

    options = SIZES | {"n_layers": 2}
    assert layers(LLamaStage(**options)) == {"0", "1"}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    ranks = {"rank": 3, "world": 5}
    monkeypatch.setattr(dist, "get_rank", lambda: ranks["rank"])
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks["world"])
    assert layers(LLamaStage(**options)) == {"6", "7"}
    assert layers(LLamaLastStage(VOCAB_SIZE, **options, first_layer=4)) == {"4", "5"}
    assert layers(CausalLLama(VOCAB_SIZE, **options)) == {"0", "1"}
    for wrong in (LLamaLastStage, LLamaFirstStage):  # rank 3 of 5 has neither in one pipeline, but may in two
        with pytest.raises(InputError, match=f"{wrong.__name__} on rank 3 of 5 without first_layer: only in a single"):
            wrong(VOCAB_SIZE, **options)
    ranks["world"] = 4
    assert layers(LLamaLastStage(VOCAB_SIZE, **options)) == {"6", "7"}
    ranks["rank"] = 0
    assert layers(LLamaFirstStage(VOCAB_SIZE, **options)) == {"0", "1"}
    ranks["world"] = 1
    assert layers(LLamaLastStage(VOCAB_SIZE, **options)) == {"0", "1"}


def test_attention_over_some_of_the_heads() -> None:
    """Narrower projections in place of the full ones compute those heads' share of the output."""
    attention = whole(num_kv_heads=2).get_submodule("model.layers.1.self_attn")
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))
    cos, sin = layers.rotary_tables(9, 6, 1e4, x.device)
    expected = attention(x, cos, sin)
    weights = attention.state_dict()
    parts = []
    for half in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = weights[f"{name}.weight"].chunk(2)[half]
            projection = layers.Linear(24, len(rows), bias=False)
            projection.load_state_dict({"weight": rows})
            setattr(attention, name, projection)
        attention.o_proj = layers.Linear(12, 24, bias=False)
        attention.o_proj.load_state_dict({"weight": weights["o_proj.weight"].chunk(2, dim=1)[half]})
        parts.append(attention(x, cos, sin))
    assert parts[0].std() > 0.01
    torch.testing.assert_close(parts[0] + parts[1], expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_repeated_for_float32_on_cuda_are_the_groups(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = whole(num_kv_heads=num_kv_heads), tokens()
    attend: Any = F.scaled_dot_product_attention
    seen, computed = [], []

    def seen_by(q: Tensor, k: Tensor, v: Tensor, *args: Any, enable_gqa: bool, **options: Any) -> Tensor:
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return attend(q, k, v, *args, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen_by)
    for in_groups in (True, False):
        monkeypatch.setattr(attention, "_attends_in_groups", lambda _, answer=in_groups: answer)
        model.zero_grad()
        logits = model(ids)
        causalLLMLoss(logits, ids, VOCAB_SIZE).backward()
        cache = model.new_cache()
        with torch.no_grad():
            continued = torch.cat([model(part, cache) for part in ids.split([6, 1, 4], dim=1)], dim=1)
        computed.append((logits, continued, gradients(model)))
    layers, kept = SIZES["n_layers"] * 4, (num_kv_heads, num_kv_heads, num_kv_heads < 4)
    assert seen == [kept] * layers + [(4, 4, False)] * layers
    torch.testing.assert_close(computed[0], computed[1])


# ------------------------------------------------------------------------------------------------- padding, precision


EVERY_TOKEN = torch.arange(VOCAB_SIZE).view(5, 10)


def embedding_gradient(padding_idx: int | None, ids: Tensor = EVERY_TOKEN) -> Tensor:
    model = LLama(CausalLLama, VOCAB_SIZE, **SIZES, padding_idx=padding_idx)
    assert (model.get_parameter("model.embed_tokens.weight").abs().sum(dim=1) > 0).all()
    causalLLMLoss(model(ids), ids, VOCAB_SIZE).backward()
    return gradients(model)["model.embed_tokens.weight"].abs().sum(dim=1)


@pytest.mark.parametrize("padding_idx", [3, 0, -1, None])
def test_only_the_padding_token_is_not_trained(padding_idx: int | None) -> None:
    untrained = embedding_gradient(padding_idx) == 0
    last = {9, 19, 29, 39, 49}  # each at the last position of a row, where it predicts nothing
    assert {*untrained.nonzero().flatten().tolist()} == last | ({padding_idx} & {3, 0})
    assert embedding_gradient(padding_idx, torch.full((1, 4), VOCAB_SIZE - 1))[-1] > 0


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "widened"])
def test_bfloat16_is_mixed_precision(native: bool, residual: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "CPU_IS_FASTER_IN_BFLOAT16", native)
    exact, mixed = whole(num_kv_heads=2), whole(num_kv_heads=2, dtype=torch.bfloat16, residual=residual)
    ids = tokens()
    seen = set()
    for module in mixed.modules():
        if isinstance(module, nn.Linear | layers.MLP | blocks.Attention):
            module.register_forward_hook(lambda _, inputs, output: seen.add((inputs[0].dtype, output.dtype)))
    stream = set()
    for block in mixed.model.layers.values():
        block.register_forward_hook(lambda _, inputs, output: stream.add((inputs[0].dtype, output.dtype)))
    heads: set[torch.dtype] = set()

    def attend(*of_layer: Tensor) -> Tensor:
        heads.update(one.dtype for one in of_layer)
        return attention.attend_to_earlier(*of_layer)

    logits = mixed(ids, part=attention.SequencePart(torch.arange(ids.shape[1]), attend))
    assert stream == {(residual, residual)}
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert heads == {torch.bfloat16}, "what ranks that share sequences send"
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())  # a bfloat16 product made them
    expected = exact(ids)
    assert not torch.equal(logits, expected)
    assert (logits - expected).norm() < 0.03 * expected.norm()

    causalLLMLoss(logits, ids, VOCAB_SIZE).backward()
    causalLLMLoss(expected, ids, VOCAB_SIZE).backward()
    expected_gradients = gradients(exact)
    for name, grad in gradients(mixed).items():
        assert mixed.get_parameter(name).dtype == grad.dtype == torch.float32
        # Up to 0.07 were seen, and as much in transformers' model under autocast.
        assert (grad - expected_gradients[name]).norm() < 0.15 * expected_gradients[name].norm(), name


def test_training_after_generating_without_gradients() -> None:
    layers.rotary_tables.cache_clear()
    model = whole()
    with torch.inference_mode():
        model(tokens())
    causalLLMLoss(model(tokens()), tokens(), VOCAB_SIZE).backward()
    assert gradients(model)


# ------------------------------------------------------------------------------------------- the key and value cache


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("parts", [[1] * 16, [15, 1], [4, 2, 1, 7]])
def test_with_a_cache_the_logits_are_the_same(parts: list[int], num_kv_heads: int) -> None:
    model = whole(num_kv_heads=num_kv_heads)
    ids = tokens(batch=3, seq=sum(parts))
    cache = model.new_cache()
    logits = torch.cat([model(part, cache) for part in ids.split(parts, dim=1)], dim=1)
    assert [layer.length for layer in cache] == [sum(parts)] * SIZES["n_layers"]
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("native", [True, False], ids=["native", "widened"])
def test_the_cache_in_bfloat16(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "CPU_IS_FASTER_IN_BFLOAT16", native)
    model = whole(num_kv_heads=2, dtype=torch.bfloat16)
    ids, cache = tokens(), model.new_cache()
    logits = torch.cat([model(part, cache) for part in ids.split([6, 1, 4], dim=1)], dim=1)
    expected = model(ids)
    assert (logits - expected).norm() < 0.03 * expected.norm()


@torch.no_grad()
def test_stages_have_caches_of_their_own() -> None:
    model = whole()
    stages: list[Any] = list(build_stages([1, 0, 3]))
    take_weights(stages, model)
    caches = [stage.new_cache() for stage in stages]
    ids, logits = tokens(), []
    for x in ids.split([7, 1, 1, 2], dim=1):
        for stage, cache in zip(stages, caches, strict=True):
            x = stage(x, cache)
        logits.append(x)
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_cache_holds_no_more_than_the_context() -> None:
    model = whole()
    cache = model.new_cache()
    model(tokens(1, 16), cache)
    with pytest.raises(InputError, match="17 tokens are too many for a model built for at most 16"):
        model(tokens(1, 1), cache)


# ----------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_heads": 5}, "num_heads 5 does not divide dmodel 24: each head must be equally wide"),
        ({"num_heads": 8}, "num_heads 8 gives heads of width 3 at dmodel 24: rotary positions need an even width"),
        (
            {"num_kv_heads": 3},
            "num_kv_heads 3 does not divide num_heads 4: each must serve as many query heads as the others",
        ),
        *(
            ({name: 0}, f"{name} 0 is too small: it must be at least 1")
            for name in ("dmodel", "num_kv_heads", "ctx_size", "vocab_size")
        ),
        ({"hidden_dim": -4}, "hidden_dim -4 is too small: it must be at least 1"),
        *(
            ({"head_dim": width}, f"head_dim {width}: rotary positions need an even width of at least 2")
            for width in (5, 0, -2)
        ),
        ({"experts": -1}, "experts -1: give 0 for none, or how many each block has"),
        *(
            (
                {"experts": experts, "experts_per_token": chosen},
                f"experts_per_token {chosen}: there are {experts} experts; give a number from 1 to {experts}",
            )
            for experts, chosen in ((4, 0), (4, 5), (1, 2))
        ),
        ({"n_layers": -1}, "n_layers -1 is too small: it must be at least 0"),
        ({"n_layers": 0}, "n_layers 0 leaves no model: it must be at least 1"),
        ({"padding_idx": 50}, "padding_idx 50 is not a token: it must be below vocab_size 50"),
        ({"dtype": torch.float16}, "dtype float16 is not supported: use float32 or bfloat16"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        LLama(CausalLLama, **{"vocab_size": VOCAB_SIZE, **SIZES, **options})
    assert str(error.value) == sentence
