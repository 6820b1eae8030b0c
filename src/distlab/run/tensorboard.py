"""The writer of records for TensorBoard."""

import threading
from typing import TYPE_CHECKING

from simplellm.errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def tensorboard_writer() -> "type[SummaryWriter]":
    """Return the class that writes event files for `tensorboard --logdir runs`; `InputError` if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("--tensorboard needs TensorBoard: pip install tensorboard") from error
    show = threading.excepthook

    def show_if_unknown(about: threading.ExceptHookArgs) -> None:
        is_writer = type(about.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(about.exc_value, OSError)):  # such as a full disk, which a step raises again
            show(about)

    threading.excepthook = show_if_unknown
    return SummaryWriter
