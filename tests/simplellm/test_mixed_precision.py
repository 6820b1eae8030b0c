"""The factors of bfloat16 products on processors with and without fast instructions for them."""

import runpy

import pytest
import torch

from simplellm import mixed_precision

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("capabilities", "widens"),
    [
        ({}, True),  # as in torch 2.11
        ({"avx512_bf16": False, "cpu_name": "AMD EPYC"}, True),
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, False),
        ({"avx512_bf16": True, "amx_bf16": False, "cpu_name": "Intel Xeon"}, True),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, False),
        ({"bf16": True}, False),  # of ARM
    ],
)
def test_products_have_the_faster_factors(
    capabilities: dict[str, object], widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    fresh = runpy.run_path(str(mixed_precision.__file__))
    factor = torch.ones(2, dtype=torch.bfloat16)
    assert (fresh["widen"](factor).dtype == torch.float32) == widens
    assert fresh["widen"](factor.double()).dtype == torch.float64
    assert fresh["widen"](factor.float()).dtype == torch.float32
