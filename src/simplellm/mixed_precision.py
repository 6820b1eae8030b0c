"""Factors of matrix products in bfloat16, on processors with and without fast instructions for them."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is bfloat16 on a CPU whose bfloat16 products are no faster, else `x` itself.

    A bfloat16 matrix product has bfloat16 factors, is summed in float32 and rounded at the end. Float32 factors give
    the same: on a CPU without bfloat16 instructions about five times faster, on Intel's without AMX up to twice.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_is_faster_in_bfloat16():
        return x.float()
    return x


def cpu_is_faster_in_bfloat16() -> bool:
    return _cpu_is_faster_in_bfloat16()  # torch's compiler would look into a cached function


@functools.cache
def _cpu_is_faster_in_bfloat16() -> bool:
    # torch 2.11 does not report capabilities; float32, which is always correct, is then used on every CPU.
    has: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(map(has.get, ("amx_bf16", "bf16"))) or (has.get("avx512_bf16", False) and "Intel" not in has["cpu_name"])
