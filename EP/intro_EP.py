"""Expert parallelism: each rank holds some of the experts, all other weights, and sequences of its own.

    python EP/intro_EP.py <rank>                      in two terminals, with the ranks 0 and 1
    ./launch.sh ep --experts 8 --experts-per-token 2  all ranks at once

A router chooses a few experts for each token. The model has sorted the tokens' rows by expert; here every row travels
to the rank that holds its expert, and the expert's output travels back (GShard: arXiv 2006.16668).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.placement import Placement, place
from distlab.comm.names import named
from distlab.parallel.expert_parallel import LoadBalance
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.experts import ExpertParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.experts import MixtureOfExperts
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = ExpertParallelSettings()


class Exchange(torch.autograd.Function):
    """Send `sent[r]` rows to each rank r, and receive `received[r]`; their gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        with named("the rows of experts", "rows of experts"):  # in messages, and in the table of bytes
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(grad, ctx.received, ctx.sent), None, None


def through_ranks(rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Sequence[int]], Tensor]) -> Tensor:
    """Return the experts' outputs for rows (rows, dmodel) sorted by expert; `counts` has the rows of each expert."""
    to_ranks = counts.view(dist.get_world_size(), -1)  # (ranks, experts of a rank)
    from_ranks = torch.empty_like(to_ranks)
    with named("the number of rows for each expert", "counts of rows"):
        dist.all_to_all_single(from_ranks, to_ranks)
    sent, received = to_ranks.sum(dim=1).tolist(), from_ranks.sum(dim=1).tolist()
    arrived = Exchange.apply(rows, sent, received)  # by source, and from each source by expert
    expert = torch.arange(from_ranks.shape[1]).repeat(len(from_ranks)).repeat_interleave(from_ranks.flatten().cpu())
    order = expert.argsort(stable=True).to(rows.device)  # by expert, and for each expert by source
    outputs = compute(arrived[order], from_ranks.sum(dim=0).tolist())
    as_arrived = order.argsort()  # the inverse of `order`: outputs in the order in which their rows arrived
    return Exchange.apply(outputs[as_arrived], received, sent)


def add_up(parameters: Mapping[str, nn.Parameter]) -> None:
    """Add up the gradients of the ranks' shares of the loss. Those of experts already have the tokens of all ranks."""
    for name, parameter in parameters.items():
        if ".experts." not in name and parameter.grad is not None:
            with named(f"the gradient of {name}", "gradients"):
                dist.all_reduce(parameter.grad)


def train(run: TrainingRun[ExpertParallelSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    own = torch.arange(args.experts).chunk(run.world_size)[run.rank].tolist()  # the experts of this rank
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options(), own_experts=own)
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    mixtures = [module for module in net.modules() if isinstance(module, MixtureOfExperts)]
    for mixture in mixtures:
        mixture.dispatch = through_ranks
        mixture.capacity = args.capacity  # no limit, unless --capacity is given: docs/experts.md
        for parameter in mixture.experts.parameters():  # no other rank holds it: for clipping and checkpoints
            place(parameter, Placement(apart=("ep",)))
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    balance = LoadBalance([net], args.balance_rate)  # gives experts with few tokens better scores
    parameters = dict(net.named_parameters())

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for ids in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(ids), ids, tokenizer.vocab_size) / args.micro_batches
            (loss / run.world_size).backward()  # a share of the mean over the ranks, so gradients only add up
            losses.append(loss)
        add_up(parameters)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()
        run.records.values.update(balance.step())  # the loads, for metrics.jsonl


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
