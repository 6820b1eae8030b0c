"""The models that bench/gpu.py measures, their training steps in the lab and in transformers, and peaks of GPUs."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.run.model import build_optimizer
from simplellm.compiler import Compiler
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096

# Dense bfloat16 products summed in float32, in TFLOP/s, by the name that CUDA gives the device, without "NVIDIA" and
# "GeForce". From NVIDIA's data sheets; a figure given with sparsity is halved. GeForce: white papers on Ada (4090) and
# RTX Blackwell (3090, 5090). A part of a GPU (MIG) has another peak.
PEAK_TFLOPS = {
    r"A40": 149.7,
    r"A100[- ].*": 312.0,
    r"H100 80GB HBM3": 989.0,
    r"H100 PCIe": 756.0,
    r"H100 NVL": 835.0,
    r"H200": 989.0,
    r"B200": 2250.0,
    r"L4": 121.0,
    r"L40": 181.0,
    r"L40S": 362.0,
    r"RTX 3090": 71.2,
    r"RTX 4090": 165.2,
    r"RTX 5090": 209.5,
}


@dataclass(frozen=True)
class Size:
    """A model, and the batch that it is measured with."""

    dmodel: int
    num_heads: int
    n_layers: int
    hidden_dim: int
    seq_len: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len

    @property
    def matrix_parameters(self) -> int:
        """Parameters that each token is multiplied by: all but the embeddings, which are looked up, and the gains."""
        layer = 4 * self.dmodel**2 + 3 * self.dmodel * self.hidden_dim
        return self.n_layers * layer + VOCAB_SIZE * self.dmodel

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + (VOCAB_SIZE + 2 * self.n_layers + 1) * self.dmodel

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that a training step needs for each token: 6 N + 6 L T d.

        For each of N parameters, 2 in the forward and 4 in the backward pass (Kaplan et al., arXiv 2001.08361). For
        attention in L layers of width d over T tokens, half of the 12 L T d in appendix B of PaLM (Chowdhery et al.,
        arXiv 2204.02311): a causal model needs half of the scores.
        """
        return 6 * self.matrix_parameters + 6 * self.n_layers * self.seq_len * self.dmodel

    def build(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16, residual: torch.dtype = torch.float32
    ) -> CausalLLama:
        names = "dmodel", "num_heads", "n_layers", "hidden_dim"
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options |= {"ctx_size": self.seq_len, "device": device, "dtype": dtype, "residual": residual}
        return LLama(CausalLLama, VOCAB_SIZE, **options)

    def batches(self, device: torch.device, count: int, seed: int) -> Tensor:
        """Token ids (count, batch, seq), the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCAB_SIZE, (count, self.batch_size, self.seq_len), generator=generator).to(device)


SIZES = {
    "tiny": Size(dmodel=32, num_heads=2, n_layers=2, hidden_dim=96, seq_len=64, batch_size=6),
    "10M": Size(dmodel=288, num_heads=6, n_layers=6, hidden_dim=1152, seq_len=1024, batch_size=48),  # the lab's default
    "100M": Size(dmodel=768, num_heads=12, n_layers=10, hidden_dim=3072, seq_len=2048, batch_size=12),
    "1B": Size(dmodel=2048, num_heads=16, n_layers=20, hidden_dim=5504, seq_len=2048, batch_size=6),
}


Step = Callable[[Tensor], float]  # trains on one batch (batch, seq), and returns its loss


def training_step(
    net: nn.Module, loss_of: Callable[[Tensor], Tensor], finish: Callable[[], None] = lambda: None
) -> tuple[Step, Optimizer]:
    """The step of primer/intro.py; `finish` completes the gradients."""
    optimizer = build_optimizer("adam", net.parameters(), lr=1e-4)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        finish()
        value = loss.item()
        optimizer.step()
        return value

    return step, optimizer


def ours(net: CausalLLama, compiled: bool = False) -> tuple[Step, Optimizer]:
    compiler = Compiler()

    def loss_of(ids: Tensor) -> Tensor:
        with compiler.applied() if compiled else contextlib.nullcontext():
            return causalLLMLoss(net(ids), ids, VOCAB_SIZE)

    return training_step(net, loss_of)


def theirs(size: Size, net: CausalLLama, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> Step:
    """The same model in transformers: parameters of this dtype, products in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.dmodel,
        "intermediate_size": size.hidden_dim,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.num_heads,
        "max_position_embeddings": size.seq_len,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    with device:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(net.state_dict())
    for parameter in model.parameters():  # not the rotary frequencies
        parameter.data = parameter.detach().to(dtype)

    def plain_loss_of(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    compiled_or_plain = torch.compile(plain_loss_of) if compiled else plain_loss_of

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
            return compiled_or_plain(ids)

    return training_step(model, loss_of)[0]


def peak_tflops(name: str) -> float | None:
    """The dense bfloat16 peak of a device that CUDA calls so; None if it is not known."""
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    known = (peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, bare))
    return None if " MIG " in name else next(known, None)
