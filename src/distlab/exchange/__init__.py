"""Exchange of models with Hugging Face's format: import, export, and reading a model from any supported folder.

May import all other packages of `distlab`.
"""

from collections.abc import Callable
from pathlib import Path

from distlab.checkpoints.models import read_model
from simplellm.import_hf import is_llama, read_llama
from simplellm.saved_model import SavedModel


def read_saved(path: Path, say: Callable[[str], None] = lambda _: None) -> SavedModel:
    """Read the model of a run, a checkpoint, or a folder in Hugging Face's format; `InputError` if there is none.

    `say` is called with a line for each checkpoint that is skipped, which says why.
    """
    return read_llama(path) if is_llama(path) else read_model(path, say)
