"""What --record-gradients writes of a parameter: its gradient, and each micro-batch's share where that is known."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distlab.run.recording import Recording, file_of
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("micro_batches", "passes", "has_shares"),
    [(2, 2, True), (2, 3, False), (2, 1, False), (1, 1, False)],  # a single share is the gradient
    ids=["known", "repeated passes", "deferred passes", "one micro-batch"],
)
def test_shares_are_written_if_each_micro_batch_added_its_own(
    micro_batches: int, passes: int, has_shares: bool, tmp_path: Path
) -> None:
    net = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = dict(net.named_parameters())

    def bring() -> None:
        net.weight.data.fill_(7)

    recording = Recording(tmp_path, 0, range(1, 3), parameters, parameters, optimizer, micro_batches, bring)
    for step in range(4):
        recording.begin(step)
        optimizer.zero_grad()
        inputs = torch.arange(3.0 * passes).view(passes, 3) + step
        for row in inputs:
            net(row).sum().backward()
        optimizer.step()
        if step not in range(1, 3):
            continue
        found = load_file(file_of(tmp_path, step, 0))
        assert torch.equal(found["gradient.weight"], inputs.sum(0))
        shares = [found[f"share.{k}.weight"] for k in range(len(found) - 2)]  # beside the gradient and the weights
        assert len(shares) == (micro_batches if has_shares else 0)
        for share, row in zip(shares, inputs, strict=False):
            assert torch.equal(share, row)
    assert [step for step in range(5) if file_of(tmp_path, step, 0).is_file()] == [1, 2, 3], "and weights at the end"
    assert load_file(file_of(tmp_path, 3, 0))["weights.weight"].unique().tolist() == [7], "which have arrived"


def test_what_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    """Of float32: the weights, their gradients, and each micro-batch's share."""
    for elements, micro_batches, told in (
        (10**8, 0, "7.2 GB; give at most 5"),
        (10**8, 2, "14.4 GB; give at most 2"),
        (10**9, 0, "72.0 GB, too much for one step"),
    ):
        own = {"weight": nn.Parameter(torch.empty(elements, device="meta"))}
        optimizer = torch.optim.SGD(own.values(), lr=0.1)
        with pytest.raises(InputError, match=f"^--record-gradients 9: rank 3 would write {told}$"):
            Recording(tmp_path, 3, range(9), own, own, optimizer, micro_batches)
