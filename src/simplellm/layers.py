"""The layers that a Llama is made of, most with a backward pass by hand: linear maps, SwiGLU, norms, rotations."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simplellm.compiled import through_compiler
from simplellm.mixed_precision import widen
from simplellm.options import RopeScaling
from simplellm.weight_gradients import current, weight_gradient

ROPE_THETA = 1e4  # the base of rotary positions in the models of the lab


class Linear(nn.Linear):
    """x @ weight.T + bias, if there is one, in the dtype of `x`; the parameters are float32."""

    adds_bias = True  # whether the layer adds the bias, or the module that contains it

    def reset_parameters(self) -> None:
        """Do nothing: `initialize` sets the weight, and the global random generator must not be used."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            y = F.linear(widen(x), widen(self.weight.to(x.dtype))).to(x.dtype)
        else:
            y = self._product(x)
        return y if self.bias is None or not self.adds_bias else y + self.bias.to(y.dtype)

    def _product(self, x: Tensor) -> Tensor:
        weight, later = self.weight, current()
        if later is not None and x.requires_grad and weight.requires_grad and weight.is_leaf:
            return _Linear.apply(x, weight.detach(), functools.partial(later.add, weight, weight_gradient))
        return _Linear.apply(x, weight, None) if x.dtype == torch.bfloat16 else F.linear(x, weight)


class _Linear(torch.autograd.Function):
    """A linear map with a float32 weight, which is cast for a bfloat16 input; or with a weight that is bfloat16 too.

    Each pass casts it again, because a copy for the backward pass would be kept for each micro-batch in progress. A
    single copy for a whole step would save 1 % of its time (3 or 8 micro-batches of 256 tokens, on an EPYC).

    With `defer`, the weight is detached, and the backward pass passes the factors of its gradient to `defer`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, defer: Callable[[Tensor, Tensor], None] | None) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(x, weight)
        return F.linear(widen(x), widen(weight.to(x.dtype))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = (widen(grad) @ widen(weight.to(x.dtype))).to(x.dtype) if ctx.needs_input_grad[0] else None
        if ctx.defer is not None:
            ctx.defer(x, grad)
        return grad_x, weight_gradient(x, grad) if ctx.needs_input_grad[1] else None, None


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, dmodel: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(dmodel, hidden_dim, bias=bias)
        self.up_proj = Linear(dmodel, hidden_dim, bias=bias)
        self.down_proj = Linear(hidden_dim, dmodel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        # The number of rows of an expert, (rows, dmodel), differs from step to step.
        return through_compiler(MLP.compute, self, x) if x.dim() == 3 else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """A feed-forward layer."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Takes the residual stream, computes in float32 and returns `dtype`.
    """

    def __init__(self, dmodel: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dmodel))
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return through_compiler(RMSNorm.compute, self, x) if x.dim() == 3 else self.compute(x)  # not of single heads

    def compute(self, x: Tensor) -> Tensor:
        """A norm."""
        if x.is_cuda or torch.compiler.is_compiling():  # torch has one kernel for each direction there, or makes it
            y = F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        else:
            y = _RMSNormFunction.apply(x, self.weight, self.eps)
        return y.to(self.dtype)


class _RMSNormFunction(torch.autograd.Function):
    """Handwritten, because torch's derivative on the CPU passes over the activations twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight.dtype).square_().div_(x.shape[-1])
        inverse_rms = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # With r = 1 / rms(x) and n = dmodel: dr/dx = -r^3 x / n. Both sums are matrix-vector products of grad * x.
        x, weight, inverse_rms = ctx.saved_tensors
        products = (grad * x).flatten(0, -2)
        grad_weight = products.T @ inverse_rms.flatten()
        dot = (products @ weight).view_as(inverse_rms)
        grad_x = (grad * weight).mul_(inverse_rms)
        grad_x.addcmul_(x.to(grad_x.dtype), dot * inverse_rms.pow(3), value=-1 / x.shape[-1])
        return grad_x.to(x.dtype), grad_weight, None


@functools.lru_cache(maxsize=8)
def rotary_tables(
    ctx_size: int, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosine (ctx, 1, head_dim) and sine (ctx, 1, head_dim / 2) of each position's angles, in float32.

    Pair i of a head rotates by theta^(-2i / head_dim) per position (Su et al., arXiv 2104.09864). The cosine is
    repeated for both halves of the head.
    """
    with torch.inference_mode(False):  # a table created while generating text must also work in training
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        # Rounded like transformers: at the end of a long context, a frequency's last digit shows in the logits. With
        # the lab's own base, it is rounded as in earlier revisions, whose runs thus resume bit for bit.
        frequencies = theta**-pairs if theta == ROPE_THETA else 1 / theta**pairs
        if scaling is not None:
            frequencies = _scaled(frequencies, scaling)
        angles = torch.outer(torch.arange(ctx_size, dtype=torch.float32, device=device), frequencies).unsqueeze(1)
        return angles.cos().repeat(1, 1, 2), angles.sin()


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them.

    As in Llama 3.1 (Grattafiori et al., arXiv 2407.21783) and transformers' rope_type "llama3".
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x (batch, seq, heads, head_dim), given the rows of the tables for them."""
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second * sin, first * sin), dim=-1)).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The derivative of a rotation is the opposite one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    # A head's halves are the two coordinates ("rotate-half"). Views avoid the usual concatenation and negation.
    # CUDA's kernels convert from and to bfloat16 while they read and write; each of a CPU's would copy first.
    wide = x if x.is_cuda else x.to(torch.promote_types(x.dtype, cos.dtype))
    y = wide * cos  # float32
    rotated = torch.empty_like(x) if x.is_cuda and x.dtype != y.dtype else y
    (first, second), (y_first, y_second) = wide.chunk(2, dim=-1), y.chunk(2, dim=-1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    torch.addcmul(y_first, second, sin, value=-direction, out=rotated_first)
    torch.addcmul(y_second, first, sin, value=direction, out=rotated_second)
    return rotated.to(x.dtype)
