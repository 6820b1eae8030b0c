"""The classifier of primer/mlp.py on several ranks, with torch's DistributedDataParallel.

    python DP/ddp/mlp_ddp.py <rank>             in three terminals, with the ranks 0, 1 and 2
    ./launch.sh mlp-ddp --world-size 2

The ranks build different weights, and the wrapper overwrites them with rank 0's. Compare `train` with that of
primer/mlp.py to see what it takes to make a loop data-parallel.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from distlab.comm.names import named
from distlab.parallel.same_model import check_parameter_closeness
from distlab.run.main import main
from distlab.run.run import Run
from distlab.settings.common import WorldSize
from simplellm.samplers import BatchSampler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from primer.mlp import MLP, REPORT_EVERY, MLPSettings, gen_dataset, report


@dataclass
class ParallelMLPSettings(WorldSize, MLPSettings):
    """The exercise on several ranks."""


DEFAULTS = ParallelMLPSettings()


def train(run: Run[ParallelMLPSettings]) -> None:
    config = run.settings
    train_set, test_set = gen_dataset(config, config.seed, run.device)
    net = MLP(config).to(run.device)
    with named("all ranks to wrap the model", "weights at the start"):
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

    global_batch = run.world_size * config.batch_size
    sampler = BatchSampler(len(train_set), global_batch, config.seed)
    run.track(net, optimizer)
    for step, rows in run.count_steps(sampler, config.niters, global_batch, "inputs"):
        points, labels = train_set[rows.chunk(run.world_size)[run.rank]]
        started = time.perf_counter()
        _, loss = model(points, labels)
        optimizer.zero_grad()
        with named("the gradients of a bucket", "gradients"):
            loss.backward()
        optimizer.step()
        run.global_loss(step, [loss])  # also waits until a GPU has finished the step
        seconds = time.perf_counter() - started
        if step % REPORT_EVERY == 0:
            close = check_parameter_closeness(model)
            assert close, f"the ranks' weights differ after step {step}"
        if step % REPORT_EVERY == 0 and run.rank == 0:
            report(step, net, train_set, test_set, seconds)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
