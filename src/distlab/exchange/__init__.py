"""Models that come from elsewhere or go there: import, export, and reading a model wherever it is kept.

May import every other room.
"""

from collections.abc import Callable
from pathlib import Path

from distlab.checkpoints.models import read_model
from simplellm.import_hf import is_llama, read_llama
from simplellm.saved_model import SavedModel


def read_saved(path: Path, say: Callable[[str], None] = lambda _: None) -> SavedModel:
    """The model of a run, a checkpoint, or a folder in Hugging Face's format; `InputError` if none can be read.

    `say` is told about each checkpoint that is passed over, and why.
    """
    return read_llama(path) if is_llama(path) else read_model(path, say)
