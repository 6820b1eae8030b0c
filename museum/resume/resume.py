"""A data loader of one's own, which a checkpoint sets back to its position.

    ./launch.sh museum/resume/resume.py --steps 50 --save-every 50 --out runs/resume
    ./launch.sh museum/resume/resume.py --steps 100 --resume runs/resume

The sequences of a text are numbered. In each step the ranks take the next ones: rank 0 the first of them, and so on.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DataParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = DataParallelSettings(
    world_size=2, batch_size=2, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


class Loader:
    """An endless iterator over batches of token ids, (batch, seq).

    Args:
        sequences: all sequences, (seq,) each, in their order.
        batch_size: sequences of each rank in a step.
    """

    def __init__(self, sequences: Iterator[Tensor], batch_size: int) -> None:
        self.sequences, self.batch_size, self.position = sequences, batch_size, 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Tensor:
        of_all = list(itertools.islice(self.sequences, self.batch_size * dist.get_world_size()))
        first = self.batch_size * dist.get_rank()
        self.position += self.batch_size
        return torch.stack(of_all[first : first + self.batch_size])

    def state_dict(self) -> dict[str, int]:
        """Return the position, the same on all ranks, as checkpoints have it: sequences from the first document on."""
        return {"document": 0, "offset": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip the sequences before a position."""
        self.position = state["offset"]
        for _ in itertools.islice(self.sequences, self.position):
            pass


def train(run: TrainingRun[DataParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    one_by_one = TinyStories(tokenizer, **(run.data_options() | {"batch_size": 1}))
    stories = Loader((batch[0] for batch in one_by_one), args.batch_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size)
        loss.backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
