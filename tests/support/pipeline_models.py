"""Small models and schedules for pipelines, their data, and the comparison with one process."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from distlab.pipeline.actions import ACTION_KINDS, Action, Program
from distlab.pipeline.executor import Pipeline
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB, WIDTH, SEQ = 11, 16, 6
LOSS = partial(causalLLMLoss, vocab_size=VOCAB)
OPTIONS = {"dmodel": WIDTH, "num_heads": 2, "ctx_size": SEQ, "seed": 3}
LEARNING_RATE = 0.1


def passes(stage: int, text: str) -> list[Action]:
    """ "F0 B0" as a stage's actions."""
    return [ACTION_KINDS[name[0]](stage, int(name[1:])) for name in text.split()]


def programs_from(text: str) -> list[Program]:
    """ "F0 B0 | 2: F0" as the actions of two workers: of the stage with the worker's number, or of the one given."""
    programs: list[Program] = []
    for stage, line in enumerate(text.split("|") if text else []):
        program = list[Action]()
        for word in line.split():
            if word.endswith(":"):
                stage = int(word[:-1])
            else:
                program += passes(stage, word)
        programs.append(program)
    return programs


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randint(VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(step))


def louder(net: nn.Module) -> nn.Module:
    """Weights five times larger, for gradients that no tolerance hides."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return net


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def update(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.sub_(LEARNING_RATE * grad_of(parameter))


def assert_near(own: Tensor, expected: Tensor | None, name: str) -> None:
    """Equal to a millionth of the largest element, or of 1 where that is larger."""
    assert expected is not None
    difference = (own - expected).abs().max().item()
    assert difference <= 1e-6 * max(1.0, expected.abs().max().item()), f"{name}: {difference}"


class BesideWhole:
    """The stages that a rank holds, and the whole model, which trains as they do."""

    def __init__(self, nets: Mapping[int, nn.Module], layers: int) -> None:
        self.nets = [louder(net) for net in nets.values()]
        self.whole = louder(LLama(CausalLLama, VOCAB, n_layers=layers, **OPTIONS))
        self.before = {name: parameter.detach().clone() for name, parameter in self.whole.named_parameters()}

    def step(self, pipeline: Pipeline, parts: Sequence[Tensor]) -> None:
        """A step of both on these micro-batches, with the same loss and gradients; then an update."""
        for net in (self.whole, *self.nets):
            net.zero_grad()
        losses, rows = pipeline.step(parts), torch.cat(tuple(parts))
        expected = LOSS(self.whole(rows), rows)
        expected.backward()
        assert len(losses) == len(parts) * any(net.lm_head is not None for net in self.nets)
        if losses:
            assert torch.stack(losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in self._own().items():
            assert_near(grad_of(parameter), self.whole.get_parameter(name).grad, name)
        for net in (self.whole, *self.nets):
            update(net)

    def compared(self) -> list[str]:
        """The names of the rank's parameters, all of which were trained, and are those of the whole model."""
        for name, parameter in self._own().items():
            assert_near(parameter, self.whole.get_parameter(name), name)
            assert (parameter - self.before[name]).abs().max() > 1e-4, f"{name} was trained"
        return [*self._own()]

    def _own(self) -> dict[str, nn.Parameter]:
        return {name: parameter for net in self.nets for name, parameter in net.named_parameters()}
