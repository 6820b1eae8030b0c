"""Parts of a tensor that lie side by side in memory, as rectangular blocks of it."""

import pytest
import torch

from distlab.axes.placement import DimSlice, FlatRange, Placement, place
from distlab.checkpoints.slices import as_held, blocks_of_range


@pytest.mark.parametrize("shape", [(7,), (3, 5), (3, 2, 4), (4, 1), ()])
def test_blocks_of_a_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            found = []
            for block in blocks_of_range(shape, start, stop):
                where = tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True))
                assert whole[where].shape == block.sizes
                found += whole[where].flatten().tolist()
            assert found == list(range(start, stop))


def test_a_matrix_has_at_most_three_blocks() -> None:
    assert max(len([*blocks_of_range((9, 4), a, b)]) for a in range(36) for b in range(a, 37)) == 3


def test_a_shard_of_a_slice_is_a_part_of_the_whole() -> None:
    """The third to the ninth element of columns 4 to 7, rows 2 to 5, of a matrix of nine rows and twelve columns."""
    whole = torch.arange(108.0).view(9, 12)
    shard = torch.nn.Parameter(whole[2:6, 4:8].flatten()[2:9].view(-1, 1))
    slices = DimSlice(1, 4, 12, ("tp",)), DimSlice(0, 2, 9, ("xp",))
    place(shard, Placement(slices, FlatRange(2, torch.Size([4, 4]), ("dp",))))
    held = as_held(shard.detach(), shard)
    assert held.size() == whole.shape
    for chunk in held.__create_chunk_list__():  # type: ignore[attr-defined]
        where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        assert torch.equal(held.views[chunk.offsets], whole[where])  # type: ignore[attr-defined]
