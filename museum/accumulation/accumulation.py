"""Answers of different lengths: only the tokens of the first sentence of each sequence are trained.

    ./launch.sh museum/accumulation/accumulation.py

The batch of each of two ranks goes through the model in two micro-batches, whose gradients add up.
"""

import torch.distributed as dist
from torch import Tensor

from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DataParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.documents import document_ids
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import next_token_loss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = DataParallelSettings(
    world_size=2, batch_size=4, micro_batches=2, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=64
)


def without_label(ids: Tensor, stop: int) -> Tensor:
    """Return which of the positions of token ids (batch, seq) predict nothing: the token after them is no answer's."""
    sentences = document_ids(ids, stop)  # the number of each token's sentence; `stop` is the last of it
    ignored = sentences.roll(-1, dims=1) > 0
    ignored[:, -1] = True
    return ignored


def train(run: TrainingRun[DataParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    stop = tokenizer.encode(".")[-1]
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for ids in batch.chunk(args.micro_batches):
            ignored = without_label(ids, stop)
            predictions = max(1, int((~ignored).sum()))
            loss = next_token_loss(net(ids), ids.roll(-1, dims=1), ignored, predictions) / args.micro_batches
            loss.backward()
            losses.append(loss)
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
