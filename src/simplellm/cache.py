"""The cache of keys and values with which a model generates text."""

from torch import Tensor


class LayerCache:
    """The keys and values that one layer's attention has computed so far, so that each token is computed only once.

    Args:
        ctx_size: number of positions to allocate.
    """

    def __init__(self, ctx_size: int) -> None:
        self.ctx_size = ctx_size
        self.length = 0  # positions so far
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next positions' keys and values, (batch, heads, seq, head_dim); return all positions' so far."""
        if self._keys is None or self._values is None:
            batch, heads, _, head_dim = keys.shape
            self._keys, self._values = keys.new_empty(2, batch, heads, self.ctx_size, head_dim)
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]
