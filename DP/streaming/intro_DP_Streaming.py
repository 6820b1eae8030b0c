"""Data parallelism over slow links: fragments of the weights are exchanged while the ranks compute, in few bits.

    python DP/streaming/intro_DP_Streaming.py <rank>  in three terminals, with the ranks 0, 1 and 2
    ./launch.sh streaming-diloco --sync-every 64 --fragments 4 --overlap-steps 8 --compress int4

The outer steps are as in `intro_DP_DiLoCo.py`, but for one fragment of the weights after another. A fragment is sent
while the next inner steps are computed, rounded to few bits (Streaming DiLoCo: Douillard et al., arXiv 2501.18512).
`OuterOptimizer` is in src/distlab/parallel/outer.py.
"""

from distlab.parallel.flat import flatten_weights
from distlab.parallel.outer import FragmentSchedule, OuterOptimizer
from distlab.run.main import main
from distlab.run.training import TrainingRun
from distlab.settings.replicas import StreamingSettings
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

DEFAULTS = StreamingSettings(batch_size=1, optimizer="adamw")


def train(run: TrainingRun[StreamingSettings]) -> None:
    args = run.settings
    tokenizer = SPTokenizer(args.tokenizer)
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, **run.model_options())
    stories = TinyStories(tokenizer, **run.data_options(), rank=run.rank, num_replicas=run.world_size)
    optimizer = run.optimizer(net)  # the inner one; its moments stay on this rank
    schedule = FragmentSchedule(args.sync_every, args.fragments, args.overlap_steps)
    weights = flatten_weights(net)  # the parameters are views of this buffer
    outer = OuterOptimizer(weights, schedule, args.outer_lr, args.outer_momentum, args.merge_alpha, args.compress)
    run.track(net, optimizer, outer=outer)

    for step, batch in run.steps(stories):
        optimizer.zero_grad()
        losses = []
        for x in batch.chunk(args.micro_batches):
            loss = causalLLMLoss(net(x), x, tokenizer.vocab_size) / args.micro_batches
            loss.backward()
            losses.append(loss)
        run.log(step, losses)
        optimizer.step()
        if (fragment := schedule.sent_after(step)) is not None:
            outer.send(fragment)  # starts to average (outer weights - own weights) of this fragment
        if (fragment := schedule.sent_after(step - args.overlap_steps)) is not None:
            outer.merge(fragment)  # an outer step with that mean as its gradient, and on from the new outer weights
    outer.wait()


if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
