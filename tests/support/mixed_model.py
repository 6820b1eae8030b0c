"""A model that has what replicas have to mind: a tied weight, frozen layers, parameters that are often idle."""

import torch
from torch import Tensor, nn


class HalfFrozen(nn.Module):
    """A frozen layer, one that is not, and a parameter that is sometimes idle; its output is in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.out = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor, is_scaled: bool) -> dict[str, Tensor]:
        y: Tensor = self.out(torch.tanh(self.frozen(x)))
        return {"y": y * self.scale if is_scaled else y}


class Mixed(nn.Module):
    """An embedding that is also the head, blocks, frozen layers in and outside of a block, some that are often idle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.named = nn.ModuleDict({"half_frozen": HalfFrozen()})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 1)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids)) * self.scale + self.shift
        has_0 = bool((ids == 0).any())
        if has_0:
            x = x + self.sometimes(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(torch.tanh(self.named["half_frozen"](x=x, is_scaled=has_0)["y"]))
        return nn.functional.cross_entropy(logits, target)
