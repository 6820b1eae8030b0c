"""The cost of a message."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The cost of a message: a fixed latency plus a time per byte."""

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf

    def seconds(self, size_bytes: float) -> float:
        """Return the time from the start of a message of this size until its arrival."""
        return self.latency_seconds + size_bytes / self.bytes_per_second
