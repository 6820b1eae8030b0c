"""Factors of matrix products in bfloat16, on processors with and without instructions for them."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is bfloat16 on a CPU without bfloat16 instructions, else `x` itself.

    A bfloat16 matrix product has bfloat16 factors, is summed in float32 and rounded at the end. A CPU without such
    instructions computes the same from float32 factors, about five times faster than by emulation.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_multiplies_bfloat16():
        return x.float()
    return x


def cpu_multiplies_bfloat16() -> bool:
    return _cpu_multiplies_bfloat16()  # torch's compiler would look into a cached function


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    # torch 2.11 does not report capabilities; float32, which is always correct, is then used on every CPU.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
