"""The small GPT of gpt.py with its layers in slices, split by hand.

    ./launch.sh examples/gpt_tp.py --world-size 2

`shard` knows only layers of simplellm, so this script says which layers are split by their outputs, and which by their
inputs. `copy_to` and `reduce_from` are f and g of TP/intro_TP.py. The embeddings, the norms and the head stay whole.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from gpt import ARCHITECTURE, GPT, Block
from torch import Tensor, nn

from distlab.parallel.tp_group import LAYERS, TPGroup, copy_to, reduce_from
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.slices import TensorParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer


@dataclass
class GPTSettings(TensorParallelSettings):
    architecture = ARCHITECTURE


DEFAULTS = GPTSettings(batch_size=3)


class SomeOutputs(nn.Module):
    """This rank's outputs of a linear layer, with their biases."""

    def __init__(self, whole: nn.Linear, slices: TPGroup) -> None:
        super().__init__()
        self.weight, self.bias = slices.own_parameter(whole.weight, 0), slices.own_parameter(whole.bias, 0)
        self._slices = slices

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy_to(x, self._slices), self.weight, self.bias)


class SomeInputs(nn.Module):
    """This rank's inputs of a linear layer. The bias is whole, and added once, to the sum over the ranks."""

    def __init__(self, whole: nn.Linear, slices: TPGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._slices = slices.own_parameter(whole.weight, 1), whole.bias, slices

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from(F.linear(x, self.weight), self._slices) + self.bias


def split(net: GPT) -> None:
    """Keep this rank's heads and hidden units; parameters keep their names."""
    for name, block in net.blocks.items():
        assert isinstance(block, Block)
        slices, attention = TPGroup(f"block {name}", LAYERS), block.attention
        for module, outputs, inputs in ((attention, "qkv", "o"), (block, ["up"], ["down"])):
            for layer in outputs:
                setattr(module, layer, SomeOutputs(getattr(module, layer), slices))
            for layer in inputs:
                setattr(module, layer, SomeInputs(getattr(module, layer), slices))


def train(run: TrainingRun[GPTSettings]) -> None:
    args, tokenizer = run.settings, SPTokenizer(run.settings.tokenizer)
    net = GPT(tokenizer.vocab_size, args)
    split(net)
    net.to(run.device)
    stories = TinyStories(tokenizer, **run.data_options())
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
