"""The writer of records for TensorBoard."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def open_tensorboard(out: Path, purge_step: int | None) -> "SummaryWriter":
    """Return a writer of event files for `tensorboard --logdir runs`; it drops the records from `purge_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    show = threading.excepthook

    def show_if_unknown(about: threading.ExceptHookArgs) -> None:
        is_writer = type(about.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(about.exc_value, OSError)):  # such as a full disk, which a step raises again
            show(about)

    threading.excepthook = show_if_unknown
    return SummaryWriter(out, purge_step=purge_step, flush_secs=10)
