"""Data parallelism that goes on when a rank dies: the others compute its rows too, and repeat the step.

    ./launch.sh dp-repair                             three ranks; then, in another terminal:
    pkill -9 -n -x 'rank 1'                           the loss continues as if nothing had happened

Every replica has the whole model, so a dead rank takes only its rows of the batch with it. Every rank reads the rows
of all replicas. When one dies, the others divide its micro-batches among them (ReCycle: Gandhi et al., arXiv
2405.14009) and repeat the step. Losses and gradients are sums over all replicas, whoever computes them, so nothing has
to be rescaled. Compare it with `intro_DP_GA.py`, whose run ends.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from distlab.comm.names import named
from distlab.parallel.flat import GradientSums
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import RepairSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = RepairSettings(batch_size=1)


def assign(replicas: int, micro_batches: int, alive: Sequence[int], together: int = 1) -> dict[int, list[int]]:
    """Return, by living rank, the micro-batches that it computes, numbered across all replicas: its own first.

    The living take turns with the micro-batches of the dead, and each turn has `together` of them.
    """
    of_replica = [range(replica * micro_batches, (replica + 1) * micro_batches) for replica in range(replicas)]
    shares = {rank: list(of_replica[rank]) for rank in alive}
    of_the_dead = [k for replica in range(replicas) if replica not in alive for k in of_replica[replica]]
    for number, k in enumerate(of_the_dead):
        shares[alive[number // together % len(alive)]].append(k)
    return shares


def add_up(gradients: GradientSums) -> Tensor:
    """Add up the gradients over the living ranks; every `parameter.grad` is a view of the result."""
    with named("the gradients", "gradients"):
        dist.all_reduce(gradients.flat)
    return gradients.total()


def train(run: TrainingRun[RepairSettings]) -> None:
    args, replicas, tokenizer = run.settings, run.world_size, SPTokenizer(run.settings.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **{**run.data_options(), "batch_size": replicas * args.batch_size})
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    made_for: Sequence[int] = ()  # the ranks that `own` and `gradients` were made for

    for step, batch in run.steps(stories):
        with run.surviving() as alive:  # if a rank dies in here, the others come back with the same step
            if alive is not made_for:
                made_for = alive
                own = assign(replicas, args.micro_batches, alive, args.moved_together)[run.rank]
                gradients = GradientSums(net, args.gradient_sums, replicas * args.micro_batches)
            gradients.flat.zero_()
            micro_batches = batch.chunk(replicas * args.micro_batches)
            losses = []
            for k in own:
                gradients.use(k)  # with --repair exact, each replica's gradients have a sum of their own
                x = micro_batches[k]
                loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
                loss.backward()
                losses.append(loss)
            total = add_up(gradients)
            total /= replicas
            run.log(step, losses)
            run.clip(optimizer)
            optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
