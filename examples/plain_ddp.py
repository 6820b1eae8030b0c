"""Torch's DistributedDataParallel on the lab's backend: a program that knows nothing else of the lab.

./launch.sh examples/plain_ddp.py --world-size 2
torchrun --nproc-per-node 2 examples/plain_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distlab  # noqa: F401  # registers the backend "lab"

dist.init_process_group("lab")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has data of its own
for step in range(200):
    x = torch.randn(32, 64, generator=generator)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # averages the gradients over the ranks
    optimizer.step()
    if step % 50 == 49 and dist.get_rank() == 0:
        print(f"{step} {loss.item():.4f}")
dist.destroy_process_group()
