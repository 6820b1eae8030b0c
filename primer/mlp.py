"""One process trains a small classifier: the exercise that DP/ddp/mlp_ddp.py and DP/mydp/mlp_mydp.py make parallel.

python primer/mlp.py                          or: ./launch.sh mlp
python primer/mlp.py --niters 300 --d-hidden 64
"""

import itertools
import time
from dataclasses import dataclass, fields
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distlab.axes.layout import layout_size
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import ResumableSettings, require_positive
from distlab.settings.resume_policy import ResumePolicy
from simplellm.errors import InputError
from simplellm.samplers import BatchSampler

REPORT_EVERY = 100
EVALUATED_BATCHES = 20


@dataclass
class ModelConfig:
    """The classifier and its training."""

    n_layers: Annotated[int, ResumePolicy.MODEL] = 4
    """linear layers"""
    d_in: Annotated[int, ResumePolicy.MODEL] = 1024
    """features of an input"""
    n_classes: Annotated[int, ResumePolicy.MODEL] = 32
    """number of classes"""
    d_hidden: Annotated[int, ResumePolicy.MODEL] = 256
    """width between the layers"""
    batch_size: Annotated[int, ResumePolicy.PER_REPLICA] = 64
    """inputs per step and rank"""
    train_size: Annotated[int, ResumePolicy.FIXED] = 10_000
    """training inputs"""
    niters: int = 1000
    """steps"""
    lr: Annotated[float, ResumePolicy.DEFAULT] = 0.1
    """learning rate"""


@dataclass
class MLPSettings(ModelConfig, ResumableSettings):
    """The exercise's command line."""

    architecture = "mlp"

    seed: Annotated[int, ResumePolicy.FIXED] = 0
    """seed of the initial weights and of the data"""

    @property
    def length(self) -> tuple[str, int]:
        return f"--niters {self.niters}", self.niters

    def check(self) -> None:
        super().check()
        require_positive(self, *(field.name for field in fields(ModelConfig)))
        ranks = layout_size(self.layout)
        if ranks * self.batch_size > self.train_size:
            needed = ranks * self.batch_size
            raise InputError(f"--train-size {self.train_size}: a batch for each of {ranks} ranks takes {needed} inputs")


DEFAULTS = MLPSettings()


class MLP(nn.Module):
    """Linear layers without biases, tanh between them; weights kaiming-uniform (He et al., arXiv 1502.01852)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        widths = [config.d_in, *[config.d_hidden] * (config.n_layers - 1), config.n_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, nonlinearity="tanh")

    def forward(self, data: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits (batch, n_classes) of `data` (batch, d_in), and the mean cross-entropy against `targets` (batch,)."""
        *hidden, last = self.layers
        for layer in hidden:
            data = torch.tanh(layer(data))
        logits = last(data)
        return logits, None if targets is None else F.cross_entropy(logits, targets)


def gen_dataset(
    config: ModelConfig, rand_state: int = 0, device: torch.device | str = "cpu"
) -> tuple[TensorDataset, TensorDataset]:
    """Make a training and a test set of noisy points around one center per class; a function of `rand_state` only.

    The points vary only in a few directions, in which neighboring classes overlap. So a model can learn the classes but
    cannot memorize the points: the test loss stays near the training loss, and both stay above zero.
    """
    directions = 8
    generator = torch.Generator().manual_seed(rand_state)
    centers = 2.2 * torch.randn(config.n_classes, directions, generator=generator)
    to_features = torch.randn(directions, config.d_in, generator=generator) / directions**0.5

    def draw(size: int) -> TensorDataset:
        labels = torch.randint(config.n_classes, (size,), generator=generator)
        points = (centers[labels] + torch.randn(size, directions, generator=generator)) @ to_features
        return TensorDataset(points.to(device), labels.to(device))

    return draw(config.train_size), draw(max(1, config.train_size // 5))


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset, batch_size: int = 50, max_batches: int | None = None) -> float:
    """Return the mean loss of `model` over `dataset`, or over its first `max_batches` batches."""
    total, count = 0.0, 0
    for index, (points, labels) in enumerate(zip(*(t.split(batch_size) for t in dataset.tensors), strict=True)):
        if index == max_batches:
            break
        _, loss = model(points, labels)
        total, count = total + loss.item() * len(points), count + len(points)
    return total / count


def report(step: int, model: nn.Module, train_set: TensorDataset, test_set: TensorDataset, seconds: float) -> None:
    """Print the exercise's line: both losses, each on its own data, and how long the step took."""
    train_loss = evaluate(model, train_set, max_batches=EVALUATED_BATCHES)
    test_loss = evaluate(model, test_set, max_batches=EVALUATED_BATCHES)
    print(
        f"step {step} | train_loss {train_loss:.4f} | test_loss {test_loss:.4f} | step time {seconds * 1000:.2f}ms",
        flush=True,
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, points: Tensor, labels: Tensor) -> Tensor:
    """Update the model once, by the gradients of this batch's loss; return the loss."""
    _, loss = model(points, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(run: Run[MLPSettings]) -> None:
    config = run.settings
    say(str({field.name: getattr(config, field.name) for field in fields(ModelConfig)}))
    train_set, test_set = gen_dataset(config, config.seed, run.device)
    model = MLP(config).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

    sampler = BatchSampler(len(train_set), config.batch_size, config.seed)
    run.track(model, optimizer)
    for step, rows in run.count_steps(sampler, config.niters, config.batch_size, "inputs"):
        points, labels = train_set[rows]
        started = time.perf_counter()
        loss = train_step(model, optimizer, points, labels)
        run.global_loss(step, [loss])  # also waits until a GPU has finished the step
        seconds = time.perf_counter() - started
        if step % REPORT_EVERY == 0:
            report(step, model, train_set, test_set, seconds)


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
