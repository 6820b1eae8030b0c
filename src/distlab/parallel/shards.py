"""What a run asks of a model whose replicas share out what each of them would hold whole."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ReplicaShards(nn.Module, ABC):
    """A wrapper of a model, or of a stage, of which each replica owns shards; see `distlab.parallel.sharded`."""

    shard: str  # what the replicas share out: "optimizer", "gradients" or "weights"

    @abstractmethod
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shards of the parameters, by the names in the whole model."""

    @abstractmethod
    def gather_weights(self) -> None:
        """After the optimizer's step, give all replicas the new weights, where they hold them whole."""

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Wait until the weights have arrived that `gather_weights` has begun to gather."""

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """The memory in which weights are gathered."""

    @abstractmethod
    def held_bytes(self) -> tuple[int, int, int]:
        """Bytes of parameters, of gradients, and of what is gathered at the peak."""
