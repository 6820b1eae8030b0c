"""The layers' own backward passes, beside torch's."""

import pytest
import torch
import torch.nn.functional as F

from simplellm.layers import RMSNorm, rotary_tables


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_norm_is_torchs_which_computes_it_on_cuda(eps: float) -> None:
    generator = torch.Generator().manual_seed(7)
    x, grad = torch.randn(2, 2, 5, 12, generator=generator)
    norm = RMSNorm(12, eps, torch.float32)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(12, generator=generator))
    results = []
    for function in (norm, lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, eps)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, *torch.autograd.grad(y, (leaf, norm.weight), grad)))
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_rounded_as_in_earlier_revisions_or_in_transformers(theta: float) -> None:
    """Those of the lab's own base as before, so that a run resumes bit for bit."""
    pairs, positions = torch.arange(0, 48, 2) / 48, torch.arange(4000.0)
    before, theirs = theta**-pairs, 1 / theta**pairs
    assert not torch.equal(before, theirs)
    _, sin = rotary_tables(4000, 48, theta, pairs.device)
    assert torch.equal(sin[:, 0], torch.outer(positions, before if theta == 1e4 else theirs).sin())
