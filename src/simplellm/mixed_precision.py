"""Factors of matrix products in bfloat16, on processors with and without fast instructions for them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# torch 2.11 does not report capabilities; float32, which is always correct, is then used on every CPU.
_HAS: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
# Intel's avx512_bf16 is no faster than float32, and needs conversions. Without a name, a CPU counts as another's.
_FAST = ["amx_bf16", "bf16"] if "Intel" in _HAS.get("cpu_name", "") else ["amx_bf16", "bf16", "avx512_bf16"]
CPU_IS_FASTER_IN_BFLOAT16 = any(_HAS.get(name) for name in _FAST)


def dtype_of_product(x: Tensor) -> torch.dtype:
    """Return float32 for a bfloat16 factor on a CPU whose bfloat16 products are no faster, else the factor's dtype.

    A bfloat16 matrix product has bfloat16 factors, is summed in float32 and rounded at the end. Float32 factors give
    the same up to rounding: without bfloat16 instructions about five times faster, on Intel's without AMX up to twice.
    """
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_IS_FASTER_IN_BFLOAT16
    return torch.float32 if is_slow else x.dtype


def widen(x: Tensor) -> Tensor:
    """Return a factor in the dtype of its product."""
    return x.to(dtype_of_product(x))
