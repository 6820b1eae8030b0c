"""The interface between a run and a model whose replicas shard its optimizer state, gradients or weights."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ReplicaShards(nn.Module, ABC):
    """A wrapper of a model, or of a stage, of which each replica owns shards; see `distlab.parallel.sharded`."""

    shard: str  # the tensors that the replicas shard: "optimizer", "gradients" or "weights"

    @abstractmethod
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's shards of the parameters, by the names in the whole model."""

    @abstractmethod
    def gather_weights(self) -> None:
        """Give all replicas the new weights after the optimizer's step, where they hold them whole."""

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Wait for the weights that `gather_weights` has started to gather."""

    @abstractmethod
    def release_weights(self) -> None:
        """Free the weights that a pass without gradients has left whole, where replicas hold only shards of them."""

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """Return the memory in which weights are gathered."""

    @abstractmethod
    def held_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, of gradients, and of gathered weights at the peak."""
