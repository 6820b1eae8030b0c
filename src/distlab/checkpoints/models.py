"""Reading a whole model, without optimizer state, from a checkpoint, and writing one as a checkpoint."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from distlab.checkpoints import LLAMA
from distlab.checkpoints.format import UNFINISHED, latest_valid, place_of
from distlab.checkpoints.saving import is_of_model, read_into, root_of, save, tensors_in
from simplellm.errors import InputError, require
from simplellm.saved_model import SavedModel


def read_model(run: Path, say: Callable[[str], None] = lambda _: None) -> SavedModel:
    """Read the model of the checkpoint that `latest_valid` finds, from any layout; `InputError` for a classifier."""
    checkpoint = latest_valid(run, say)
    what = f"{checkpoint.folder}: its model is of the architecture {checkpoint.architecture}"
    require(checkpoint.architecture == LLAMA, f"{what}; only a {LLAMA} can tell stories and be exported")
    parameters = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in tensors_in(checkpoint.folder).items()
        if is_of_model(name)
    }
    read_into(parameters, checkpoint)
    record = checkpoint.record
    has_mask = record["settings"].get("document_mask", False)
    return SavedModel(record["model"], parameters, checkpoint.tokenizer, checkpoint.step, has_mask)


def write_model(run: Path, model: SavedModel) -> None:
    """Write a model as a run with one checkpoint at step 0; after a failure, such as `InputError`, nothing remains."""
    record = {"step": 0, "tokens": 0, "model": model.options, "settings": {}}
    tokenizer, unfinished = model.tokenizer.read_bytes(), place_of(run, 0, UNFINISHED)
    made = [path for path in unfinished.parents if not path.exists()]
    try:
        save(run, dict(model.parameters), record, tokenizer, keep=1)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        if isinstance(error, InputError):
            why = root_of(error.__cause__ or error)
            raise InputError(f"{run}: cannot be written ({why}); give another folder") from error
        raise
