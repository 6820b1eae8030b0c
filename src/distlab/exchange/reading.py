"""A model to read, wherever it is kept."""

from collections.abc import Callable
from pathlib import Path

from distlab.checkpoints.models import read_model
from simplellm.import_hf import is_llama, read_llama
from simplellm.saved_model import SavedModel


def read_saved(path: Path, say: Callable[[str], None] = lambda _: None) -> SavedModel:
    """The model of a run, of a checkpoint, or of a folder in Hugging Face's format.

    Args:
        path: of the folder.
        say: told about each checkpoint that is passed over, and why.

    Raises:
        InputError: there is none that can be read.
    """
    return read_llama(path) if is_llama(path) else read_model(path, say)
