"""Experts on two ranks, with a router in each layer: all ranks hold the same router, which is trained like the rest.

    ./launch.sh museum/routers/routers.py

The rows of tokens travel to the rank of their expert and back; the exchange divides the gradients that come back by the
number of ranks. So what is left to do is to average the gradients of all parameters that both ranks hold.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.parallel.expert_parallel import share_experts
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.experts import ExpertParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ExpertParallelSettings(batch_size=2, steps=100, dmodel=64, num_heads=4, n_layers=2, seq_len=64, lr=2e-3)


def train(run: TrainingRun[ExpertParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    own = torch.arange(args.experts).chunk(run.world_size)[run.rank].tolist()  # the experts of this rank
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options(), own_experts=own)
    share_experts([net], run.grid.axis("ep"))
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    replicated = [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and ".mlp." not in name  # the experts' gradients have the tokens of all ranks
    ]

    for step, ids in run.steps(stories):
        optimizer.zero_grad()
        loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size)
        loss.backward()
        for parameter in replicated:
            dist.all_reduce(parameter.grad, ReduceOp.AVG)
        run.log(step, [loss])
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
