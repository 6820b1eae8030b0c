"""Data parallelism over slow links: each rank trains on its own, and an outer optimizer averages what it learned.

    python DP/diloco/intro_DP_DiLoCo.py <rank>        in three terminals, with the ranks 0, 1 and 2
    ./launch.sh diloco --sync-every 50                all ranks at once, an outer step after every 50 inner steps

As in `intro_DP_WA.py`, each rank takes many steps with its own gradients. But the change of its weights since the last
exchange counts as a gradient: its mean over the ranks is the gradient of an outer step, by SGD with Nesterov momentum,
and all ranks continue from the new outer weights (DiLoCo: Douillard et al., arXiv 2311.08105).
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from distlab.comm.names import named
from distlab.parallel.flat import flatten_weights
from distlab.parallel.outer import OuterState
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import DiLoCoSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = DiLoCoSettings(batch_size=1, optimizer="adamw")
MORE = "../streaming/intro_DP_Streaming.py"  # exchanges fragments of the weights


def train(run: TrainingRun[DiLoCoSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)  # the inner one; its moments stay on this rank
    weights = flatten_weights(net)  # this rank's own; the parameters are views of this buffer
    outer, momentum = weights.clone(), torch.zeros_like(weights)  # the same on all ranks
    run.track(net, optimizer, outer=OuterState(weights, outer, momentum))  # for checkpoints, validation

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        optimizer.step()
        if (step + 1) % args.sync_every == 0:
            gradient = outer - weights
            with named(f"the outer gradients after step {step}", "outer gradients"):
                dist.all_reduce(gradient, ReduceOp.AVG)
            momentum.mul_(args.outer_momentum).add_(gradient)
            outer.sub_(gradient + args.outer_momentum * momentum, alpha=args.outer_lr)  # Nesterov's
            weights.copy_(outer)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
