"""Data parallelism that goes on when a rank dies: the others compute its rows too, and repeat the step.

    ./launch.sh dp-repair                             three ranks; then, in another terminal:
    pkill -9 -n -x 'rank 1'                           the loss continues as if nothing had happened

Every replica has the whole model, so a dead rank takes only its rows of the batch with it. Every rank reads the rows
of all replicas. When one dies, the others divide its micro-batches among them (ReCycle: Gandhi et al., arXiv
2405.14009) and repeat the step. Losses and gradients are sums over all replicas, whoever computes them, so nothing has
to be rescaled. Compare it with `intro_DP_GA.py`, whose run ends.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.names import named
from distlab.parallel.flat import flatten_gradients
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import RepairSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = RepairSettings(batch_size=1)


def assign(replicas: int, micro_batches: int, alive: Sequence[int], whole: bool) -> dict[int, list[tuple[int, int]]]:
    """Return, by living rank, the (replica, micro-batch) pairs that it computes: its own first.

    Those of the dead go around among the living; with `whole`, all of a replica's to the same rank.
    """
    shares = {rank: [(rank, k) for k in range(micro_batches)] for rank in alive}
    dead = [replica for replica in range(replicas) if replica not in alive]
    for number, pair in enumerate((replica, k) for replica in dead for k in range(micro_batches)):
        shares[alive[(number // micro_batches if whole else number) % len(alive)]].append(pair)
    return shares


def add_up(gradients: Tensor) -> None:
    """Replace the gradients, (1 or replicas, elements), by their sum over the ranks, in the first row.

    With a row for each replica, one rank has it and the others have zeros; the rows are added in the order of the
    replicas, whoever has computed them: bit for bit the same sum.
    """
    with named("the gradients", "gradients"):
        dist.all_reduce(gradients)
    total, *others = gradients
    for row in others:
        total += row


def train(run: TrainingRun[RepairSettings]) -> None:
    args, replicas = run.settings, run.world_size
    tokenizer, is_exact = SPTokenizer(args.tokenizer), args.repair == "exact"
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    of_all = {**run.data_options(), "batch_size": replicas * args.batch_size}
    stories = TinyStories(tokenizer, **of_all)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)
    made_for: Sequence[int] = ()  # the ranks among which the gradients are added up

    for step, batch in run.steps(stories):
        with run.surviving() as alive:  # if a rank dies in here, the others come back with the same step
            if alive is not made_for:
                made_for, gradients = alive, flatten_gradients(net)  # in memory that these ranks share
            gradients.zero_()
            rows = [part.chunk(args.micro_batches) for part in batch.chunk(replicas)]
            sums = gradients.new_zeros(replicas, len(gradients)) if is_exact else gradients[None]
            losses = []
            for replica, k in assign(replicas, args.micro_batches, alive, whole=is_exact)[run.rank]:
                x = rows[replica][k]
                loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
                loss.backward()
                losses.append(loss)
                if is_exact and k == args.micro_batches - 1:  # this replica's are complete
                    sums[replica] = gradients
                    gradients.zero_()
            add_up(sums)
            torch.div(sums[0], replicas, out=gradients)
            run.log(step, losses)
            run.clip(optimizer)
            optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
