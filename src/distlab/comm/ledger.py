"""Accounting of what a rank sends, and of how long it waits."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """What this rank has sent, by kind, and how long it has waited."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # messages and collectives started
    waited_seconds: float = 0.0  # spent in `Transfer.wait`
    _counted_as: str | None = None

    def count(self, kind: str, sent_bytes: int) -> None:
        """Add a message or collective."""
        kind = self._counted_as or kind
        self.sent_bytes[kind] += sent_bytes
        self.messages[kind] += 1

    @contextlib.contextmanager
    def counted_as(self, kind: str) -> Iterator[None]:
        """Count everything sent inside as this kind, whatever it is."""
        outer, self._counted_as = self._counted_as, kind
        try:
            yield
        finally:
            self._counted_as = outer
