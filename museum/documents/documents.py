"""Several documents in each sequence, so that no token is padding: packing.

    ./launch.sh museum/documents/documents.py

Positions start again with each document, so each document is trained as if it were alone.
"""

import torch.distributed as dist
from torch import Tensor

from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DataParallelSettings
from simplellm.attention import SequencePart, attend_to_earlier
from simplellm.dataloaders import TinyStories
from simplellm.documents import document_ids, positions_in_documents
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = DataParallelSettings(
    world_size=2, batch_size=2, steps=100, lr=2e-3, dmodel=64, num_heads=4, n_layers=2, seq_len=256
)


def packed(ids: Tensor, end: int) -> SequencePart:
    """Return the positions and the attention of token ids (batch, seq); each document's last token is `end`."""
    documents = document_ids(ids, end)  # the number of each token's document, (batch, seq)
    positions = positions_in_documents(documents)
    return SequencePart(positions, attend_to_earlier)


def train(run: TrainingRun[DataParallelSettings]) -> None:
    tokenizer = SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = causalLLMLoss(net(ids, part=packed(ids, tokenizer.eos_id)), ids, tokenizer.vocab_size)
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
