"""Llama, whole or as the stages of a pipeline.

The model is from Touvron et al. (arXiv 2302.13971): pre-norm blocks with RMSNorm, rotary positions, causal
attention (optionally grouped-query) and SwiGLU, usually without biases, and with an untied head. In place of a SwiGLU,
a block may have a mixture of experts (`simplellm.experts`). Parameters have the names of Hugging Face's
``LlamaForCausalLM``. A stage's parameters have the same names as in the whole model: state dicts load in both
directions, and the state dicts of all stages together make up the whole model's.

With `dtype` bfloat16 the model computes in mixed precision: parameters, their gradients, the residual stream, the
statistics of the norms and the logits are float32; everything between a norm and the next residual sum is bfloat16.
With `residual` bfloat16, so is the residual stream within a stage.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simplellm.attention import SequencePart, attend_to_earlier
from simplellm.blocks import Attention, Block, logits
from simplellm.compiled import through_compiler
from simplellm.errors import InputError
from simplellm.initial_weights import initialize
from simplellm.layers import MLP, ROPE_THETA, Linear, RMSNorm, rotary_tables
from simplellm.options import BLOCK_BY_BLOCK, Mixture, Recompute, RopeScaling, RouterScores, check_heads, check_mixture

if TYPE_CHECKING:
    from simplellm.absent_weights import InitialWeights
    from simplellm.cache import LayerCache


class _Decoder(nn.Module):
    """The modules under ``model.`` in Hugging Face's names; the layers' keys are their indices in the whole model."""

    def __init__(self, embed_tokens: nn.Embedding | None, layers: dict[str, nn.Module], norm: RMSNorm | None) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleDict(layers)
        self.norm = norm


class LLamaPart(nn.Module):
    """Consecutive layers of the model, with the embedding, the head or both, depending on the subclass.

    Args:
        vocab_size: tokens in the vocabulary; a middle stage does not use it.
        dmodel: width of the residual stream.
        num_heads: attention heads.
        device: where the parameters live; torch's default device if None.
        n_layers: layers of this part; a stage may have none.
        ctx_size: the longest sequence, in tokens.
        padding_idx: a token whose embedding is not trained; None or a negative number for none.
        num_kv_heads: key and value heads, a divisor of `num_heads`; by default `num_heads`.
        hidden_dim: width inside the MLP; 4 * dmodel if None.
        rope_theta: base of the rotary positions' wavelengths.
        norm_eps: added to the mean square in the norms.
        dtype: torch.float32, or torch.bfloat16 to compute in mixed precision; parameters are float32 in either.
        residual: the same for the residual stream; bfloat16 only with that `dtype`.
        seed: the run's seed; weights follow from it and the parameters' names alone (see `initial_weights`).
        first_layer: the index in the whole model of this part's first layer. The default is right for a pipeline whose
            stages hold `n_layers` layers each, one stage a rank in the order of ranks: rank * n_layers where
            torch.distributed is initialized, else 0. In any other layout, such as several pipelines, give it to every
            stage; without it, a first or last stage on an unexpected rank is refused.
        document_end: the token that ends a document, beyond which no token attends; None if all may. A stage without
            the embedding then needs `part` on each call, because it does not see the tokens.
        recompute: the activations that the backward pass computes again instead of keeping them: "blocks", the inside
            of each block, block by block; "except-attention", the same, with the output of attention kept; "all", also
            the norm before the head.
        head_dim: width of a head, even; dmodel / num_heads if None.
        rope_scaling: the fields of `RopeScaling`, for rotary positions that are scaled as in Llama 3.1.
        attention_bias, mlp_bias: whether the linear layers there have biases.
        qk_norm: whether queries and keys are normalized, each head by its own size, as in Qwen3 (arXiv 2505.09388).
        experts: networks, each `hidden_dim` wide, in place of one MLP in each block, of which a router chooses
            `experts_per_token` for each token; 0 for no experts.
        experts_per_token, shared_expert, router_scores: see `Mixture`.
        own_experts: the numbers of the experts that this process holds; all if None.
        without_weights: leaves the weights out: whoever divides the model takes its parts from `initial`.

    Attributes:
        options: the arguments that make the same model again, except for weights and device.
        initial: with `without_weights`, the initial weights by name, until the model has its weights; else None.

    Raises:
        InputError: the sizes do not fit together, or the default of `first_layer` does not fit the ranks; on a call,
            the input is longer than `ctx_size`.
    """

    has_embedding: ClassVar[bool] = False
    has_head: ClassVar[bool] = False
    initial: "InitialWeights | None" = None

    def __init__(
        self,
        vocab_size: int = 0,
        dmodel: int = 288,
        num_heads: int = 6,
        device: torch.device | str | None = None,
        n_layers: int = 6,
        ctx_size: int = 256,
        padding_idx: int | None = None,
        *,
        num_kv_heads: int | None = None,
        hidden_dim: int | None = None,
        rope_theta: float = ROPE_THETA,
        norm_eps: float = 1e-6,
        dtype: torch.dtype = torch.float32,
        residual: torch.dtype = torch.float32,
        seed: int = 0,
        first_layer: int | None = None,
        document_end: int | None = None,
        recompute: Recompute = "none",
        head_dim: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        experts: int = 0,
        experts_per_token: int = 2,
        shared_expert: bool = False,
        router_scores: RouterScores = "softmax",
        own_experts: Sequence[int] | None = None,
        qk_norm: bool = False,
        without_weights: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_dim = 4 * dmodel if hidden_dim is None else hidden_dim
        if first_layer is None:
            first_layer = self._stage_of_rank() * n_layers
        if padding_idx is not None and padding_idx < 0:
            padding_idx = None  # SentencePiece's "no such token"; nn.Embedding would count from the end
        self.options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "dmodel": dmodel,
            "num_heads": num_heads,
            "n_layers": n_layers,
            "ctx_size": ctx_size,
            "padding_idx": padding_idx,
            "num_kv_heads": num_kv_heads,
            "hidden_dim": hidden_dim,
            "rope_theta": rope_theta,
            "norm_eps": norm_eps,
        }
        if self.has_embedding or self.has_head:
            _check_vocabulary(vocab_size, padding_idx)
        _check_sizes(self.options, dtype, head_dim)
        if n_layers == 0 and self.has_embedding and self.has_head:
            raise InputError("n_layers 0 leaves no model: it must be at least 1")
        scaling = RopeScaling.of(rope_scaling)
        unusual = {
            "head_dim": head_dim,
            "rope_scaling": scaling and scaling._asdict(),
            "attention_bias": attention_bias,
            "mlp_bias": mlp_bias,
            "qk_norm": qk_norm,
        }
        self.options |= {name: value for name, value in unusual.items() if value}
        mixture = None
        if experts:
            from simplellm.experts import MixtureOfExperts

            check_mixture(experts, experts_per_token)
            mixture = Mixture(experts, experts_per_token, shared_expert, router_scores, own_experts)
            self.options |= mixture.options
        self.ctx_size = ctx_size
        self.head_dim = head_dim or dmodel // num_heads
        self.rope_theta, self.rope_scaling = rope_theta, scaling
        self.document_end = document_end
        self.recompute, self.residual, self._dtype = recompute, residual, dtype
        device = torch.get_default_device() if device is None else torch.device(device)
        norm_of = partial(RMSNorm, eps=norm_eps, dtype=dtype)
        of_heads = partial(norm_of, self.head_dim) if qk_norm else None

        def block() -> Block:
            attention = Attention(dmodel, num_heads, num_kv_heads, self.head_dim, attention_bias, of_heads)
            mlp = MixtureOfExperts(dmodel, hidden_dim, mixture) if mixture else MLP(dmodel, hidden_dim, mlp_bias)
            return Block(attention, mlp, partial(norm_of, dmodel))

        with torch.device("meta") if without_weights else device:
            layers: dict[str, nn.Module] = {str(first_layer + index): block() for index in range(n_layers)}
            embed_tokens = norm = None
            if self.has_embedding:
                rows = torch.empty(vocab_size, dmodel)  # nn.Embedding would draw random numbers
                embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=padding_idx)
            if self.has_head:
                norm = norm_of(dmodel)
            self.model = _Decoder(embed_tokens, layers, norm)
            self.lm_head = Linear(dmodel, vocab_size, bias=False) if self.has_head else None
        if without_weights:
            from simplellm.absent_weights import InitialWeights

            self.initial = InitialWeights(self, seed, device)
        else:
            initialize(self, seed)

    def _stage_of_rank(self) -> int:
        """Return this part's stage in a pipeline of all ranks."""
        is_whole = self.has_embedding and self.has_head
        if is_whole or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return 0
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if (self.has_embedding, self.has_head) != (rank == 0, rank == ranks - 1):
            raise InputError(
                f"{type(self).__name__} on rank {rank} of {ranks} without first_layer: only in a single pipeline, with "
                "stage r on rank r, does it follow from the rank; give every stage first_layer=, the index of its "
                "first layer in the whole model"
            )
        return rank

    def forward(self, x: Tensor, cache: "list[LayerCache] | None" = None, part: SequencePart | None = None) -> Tensor:
        """Token ids (batch, seq) or float32 activations (batch, seq, dmodel) -> logits or activations, float32.

        With a `cache` (see `new_cache`), `x` continues the inputs of earlier calls with the same cache. With a `part`,
        it determines the positions and the attention of the tokens.
        """
        if part is None and cache is None:
            part = self.part_of(x)
        tables = rotary_tables(self.ctx_size, self.head_dim, self.rope_theta, x.device, self.rope_scaling)
        start = cache[0].length if cache else 0
        end = start + x.shape[1]
        if end > self.ctx_size:
            raise InputError(f"{end} tokens are too many for a model built for at most {self.ctx_size}")
        cos, sin = (table[start:end] if part is None else table[part.positions] for table in tables)
        attend = attend_to_earlier if part is None else part.attend
        if self.recompute == "except-attention":
            from simplellm.recomputation import once

            attend = partial(once, attend)
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        if self.residual == torch.bfloat16:
            x = x.to(self.residual)
        caches: Sequence[LayerCache | None] = cache or [None] * len(self.model.layers)
        for layer, layer_cache in zip(self.model.layers.values(), caches, strict=True):
            block = partial(layer, cache=layer_cache, attend=attend)
            x = self._recomputed(block, (*BLOCK_BY_BLOCK, "all"))(x, cos, sin)
        if self.lm_head is not None:
            x = self._recomputed(self._logits, ("all",))(x)
        return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()

    def _recomputed(self, function: Callable[..., Tensor], kinds: Collection[str]) -> Callable[..., Tensor]:
        """Return the function; if the model recomputes one of these kinds, such that it keeps only its inputs."""
        if self.recompute not in kinds:
            return function
        from simplellm.recomputation import Recomputed

        return Recomputed(function)

    def rounded_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that a pass rounds to bfloat16 before it uses them: of all linear layers but routers.

        There are none if the model computes in float32.
        """
        linear = [module for module in self.modules() if type(module) is Linear]
        return [p for module in linear for p in module.parameters()] if self._dtype == torch.bfloat16 else []

    def part_of(self, ids: Tensor) -> SequencePart | None:
        """Return how token ids (batch, seq) attend within documents; None if the model ignores documents.

        Raises:
            InputError: `ids` are activations.
        """
        if self.document_end is None:
            return None
        if ids.is_floating_point():
            raise InputError("a stage without the embedding needs the part of the sequence (part=) to mask documents")
        from simplellm.documents import within_documents

        return within_documents(ids, self.document_end)

    def _logits(self, x: Tensor) -> Tensor:
        assert self.model.norm is not None
        assert self.lm_head is not None
        return through_compiler(logits, self.model.norm, self.lm_head, x)

    def new_cache(self) -> "list[LayerCache]":
        """Return an empty cache of keys and values for each layer, for generating text without gradients."""
        from simplellm.cache import LayerCache

        return [LayerCache(self.ctx_size) for _ in self.model.layers]


class CausalLLama(LLamaPart):
    """The whole model: token ids (batch, seq) -> logits (batch, seq, vocab)."""

    has_embedding = True
    has_head = True


class LLamaFirstStage(LLamaPart):
    """The embedding and the first layers: token ids (batch, seq) -> activations (batch, seq, dmodel)."""

    has_embedding = True

    def embed(self, ids: Tensor) -> Tensor:
        """Call the stage; the pipeline scripts use this name."""
        activations: Tensor = self(ids)
        return activations


class LLamaStage(LLamaPart):
    """Layers from the middle: activations (batch, seq, dmodel) -> activations of the same shape."""


class LLamaLastStage(LLamaPart):
    """The last layers, the norm and the head: activations (batch, seq, dmodel) -> logits (batch, seq, vocab)."""

    has_head = True


PartT = TypeVar("PartT", bound=LLamaPart)


def LLama(model_class: type[PartT], vocab_size: int, **options: Any) -> PartT:
    """Build `model_class`, e.g. ``LLama(CausalLLama, tokenizer.vocab_size, dmodel=288)``; options as in `LLamaPart`."""
    return model_class(vocab_size, **options)


def _check_vocabulary(vocab_size: int, padding_idx: int | None) -> None:
    if vocab_size < 1:
        raise InputError(f"vocab_size {vocab_size} is too small: it must be at least 1")
    if padding_idx is not None and padding_idx >= vocab_size:
        raise InputError(f"padding_idx {padding_idx} is not a token: it must be below vocab_size {vocab_size}")


def _check_sizes(options: Mapping[str, Any], dtype: torch.dtype, head_dim: int | None) -> None:
    for name in ("dmodel", "num_heads", "num_kv_heads", "hidden_dim", "n_layers", "ctx_size"):
        smallest = 0 if name == "n_layers" else 1
        if options[name] < smallest:
            raise InputError(f"{name} {options[name]} is too small: it must be at least {smallest}")
    check_heads(options["dmodel"], options["num_heads"], options["num_kv_heads"], head_dim)
    if dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"dtype {str(dtype).removeprefix('torch.')} is not supported: use float32 or bfloat16")
