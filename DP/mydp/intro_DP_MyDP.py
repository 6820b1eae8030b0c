"""Data parallelism with the lab's own wrapper: the same run, with the averaging in hooks of the backward pass.

    python DP/mydp/intro_DP_MyDP.py <rank>            in three terminals, with the ranks 0, 1 and 2
    ./launch.sh mydp --world-size 4                   all ranks at once

`MyDP` (in src/distlab/parallel/data.py) starts all ranks from rank 0's weights and averages the gradients in hooks,
like `intro_DP_hooks.py`, but in buckets: one message carries many gradients. `check_parameter_closeness` shows that
the ranks' weights stay the same.
"""

from distlab.parallel.data import MyDP
from distlab.parallel.same_model import check_parameter_closeness
from distlab.run.main import main
from distlab.run.terminal import say
from distlab.run.training import TrainingRun
from distlab.settings.replicas import WrappedSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = WrappedSettings(batch_size=1)


def train(run: TrainingRun[WrappedSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = MyDP(LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options()))
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)
    run.track(net, optimizer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()  # returns with averaged gradients
            losses.append(loss)
        run.log(step, losses)
        run.clip(optimizer)
        optimizer.step()

    close = check_parameter_closeness(net)
    if run.rank == 0:
        say(f"after the last step all ranks hold {'the same' if close else 'DIFFERENT'} weights")


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
