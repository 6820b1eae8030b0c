"""All tensors of a run on several ranks beside one process's: the first difference, and the mistake behind it."""

import itertools

import torch
from torch import Tensor

from distlab.axes.layout import replica_of
from distlab_compare import mistakes
from distlab_compare.mistakes import Mistake
from distlab_compare.records import Recordings, TensorPart
from distlab_compare.runs import Pair
from distlab_exercises.catalogue import Trial
from distlab_exercises.ranks import Facts, Report
from distlab_exercises.verdict import Wrong, expect

# The ledger's columns of collectives that have no name, such as those of a loop over the parameters.
COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"


class Comparison(Pair):
    """A recorded run of a student's script, and one process that has recorded each replica's and micro-batch's share.

    Args:
        facts: the report of the one process, `one`.
        lr: learning rate of both, with plain SGD.
        reports: those of the script's ranks.
    """

    def __init__(
        self, trial: Trial, run: Recordings, one: Recordings, facts: Facts, lr: float, reports: list[Report]
    ) -> None:
        super().__init__(run, one, mistakes.TOLERANCE, micro_batches=trial.micro_batches)
        self.trial, self.facts, self.lr, self.reports = trial, facts, lr, reports
        self.describe, self.count = run.describe, len(facts["losses"])  # of steps
        self.member = "pipeline" if trial.layout.get("pp", 1) > 1 else "replica"
        if len(reports) == trial.replicas:
            self.member = "rank"

    def expect_one_process(self, losses: list[float], weights_only: bool) -> str:
        """Return what is equal; raise `Wrong` with the first step in which something differs, and a description."""
        self._expect_all_parameters()
        self._expect_right_start()
        for step in range(self.count):
            self._expect_loss(step, losses)
            for what in ["weights"] if weights_only else ["gradient", "weights"]:
                if divergence := self.divergence(what, step):
                    raise Wrong(divergence.differences[0].mistake.name, *divergence.sentences)
        return f"losses, {'' if weights_only else 'gradients, '}weights of {self.count} steps"

    def expect_right_data(self) -> None:
        """Raise `Wrong` with the first step in which a rank has other sequences than its own."""
        right = self.facts["tokens"]  # by step and replica
        for step in range(self.count):
            for report in self.reports:
                own, replica = report.facts["tokens"][step], replica_of(self.trial.layout, report.rank)
                if own != right[step][replica]:
                    told = f"step {step}: {self.describe(report.rank)} has {self._whose(own)}, not its own"
                    raise Wrong("wrong-data", told)

    def _whose(self, batch: list[list[int]]) -> str:
        for step, batches in enumerate(self.facts["tokens"]):
            for replica, right in enumerate(batches):
                if batch == right:
                    return f"the sequences of {self.member} {replica} in step {step}"
                if batch[0] in right:
                    return f"sequences from number {right.index(batch[0])} of {self.member} {replica} in step {step} on"
        return f"sequences of none of the steps up to {self.count - 1}"

    def _expect_all_parameters(self) -> None:
        for report in self.reports:
            times = f"{self.describe(report.rank)} updated its weights {report.facts['updates']} times"
            is_each_step = report.facts["updates"] == self.count and len(self.run.steps) == self.count + 1
            expect(is_each_step, "parameters", f"{times} in {self.count} steps: once in each step is right")
        held = self.run.names(0, "weights")
        for name in self.other.names(0, "weights"):
            expect(name in held, "parameters", f"no rank holds the parameter {name}")
        trained = self.run.names(0, "gradient")
        for name in self.other.names(0, "gradient"):
            expect(name in trained, "zero", f"no rank trains the parameter {name}: its requires_grad is False")

    def _expect_right_start(self) -> None:
        divergence = self.divergence("start", 0)
        if divergence is None:
            return
        first = divergence.differences[0]
        weights = f"the weights {first.name} on {self.describe(first.rank)}"
        told = f"step 0: something has changed {weights} before optimizer.step(), which alone should change them"
        expect(first.name not in self.reports[first.rank].facts["changed_early"], "changed-early", told)
        told = f"before step 0: {weights} are not those of one process"
        expect(self.trial.replicas == 1, "not-broadcast", f"{told}; all ranks must start from rank 0's")
        raise Wrong("wrong-start", told)

    def _expect_loss(self, step: int, losses: list[float]) -> None:
        n, m, expected = self.trial.replicas, self.trial.micro_batches, self.facts["losses"][step]
        calls = min(len(losses), *(len(report.facts["logged"]) for report in self.reports))
        expect(step < calls, "steps", f"run.log(step, losses) was called in {calls} of {self.count} steps")
        given = sum(report.facts["logged"][step] for report in self.reports)
        told = f"step {step}: no rank gave run.log a loss: put that of each micro-batch into `losses`"
        expect(given > 0, "no-loss", told)
        if abs(losses[step] - expected) > 1e-4 * abs(expected):
            mistake = mistakes.name_loss(losses[step], expected, n, m)
            told = f"{losses[step]:.6f} instead of {expected:.6f}"
            sentence = mistake.sentence
            if not self.divergence("gradient", step):
                sentence += "; the gradients are right, so only the loss that run.log prints is wrong"
            elif mistake.name == "loss" and self.trial.layout.get("pp", 1) > 1:
                sentence += ", or a stage gets activations that are not final"
            raise Wrong(mistake.name, f"the loss of step {step} {sentence} ({told})")

    def shares_of(self, step: int, name: str, part: TensorPart) -> list[list[Tensor]]:
        """Return a gradient's shares by replica and micro-batch; of a single one, the gradient itself."""
        return super().shares_of(step, name, part) or [[part.of(self.other.whole(step, "gradient", name))]]

    def name_gradient(self, step: int, rank: int, name: str, part: TensorPart, right: Tensor) -> Mistake:
        before = part.of(self.other.whole(step - 1, "gradient", name)) if step else None
        replica = self.replica_of("gradient", step, rank, name, part)
        found = mistakes.name_gradient(part.flat, self.shares_of(step, name, part), before, replica, self.member)
        if found.name != "other":
            return found
        mine = replica_of(self.trial.layout, rank)
        copies = [
            other.flat
            for holder, other in self.run.parts(step, "gradient", name)
            if part.is_whole and other.is_whole and replica_of(self.trial.layout, holder) == mine
        ]
        if len(copies) > 1 and not mistakes.differs(torch.stack(copies).sum(0), right):
            told = f"is a part of the gradient: only the sum over the {len(copies)} ranks that hold copies is right"
            return Mistake("part", told)
        ratio = float(part.flat.norm() / right.norm().clamp_min(1e-30))
        detail = f"; its norm is {ratio:.2f} times that of the right one"
        if any(mistakes.differs(copy, part.flat) for copy in copies):
            detail += ", and ranks that hold copies have different ones"
        return Mistake(found.name, found.sentence, detail)

    def name_weights(self, step: int, rank: int, name: str, part: TensorPart, right: Tensor) -> Mistake:
        if step == 0:
            return Mistake("start", "")
        before = part.of(self.other.whole(step - 1, "weights", name))
        if self._is_elsewhere(step, name, part, before):
            told = "are those before the update, or some of them are: what another rank has updated did not arrive"
            return Mistake("not-gathered", told)
        replica = self.replica_of("weights", step, rank, name, part)
        return mistakes.name_weights(
            part.flat, before, self.shares_of(step - 1, name, part), self.lr, replica, self.member
        )

    def _is_elsewhere(self, step: int, name: str, part: TensorPart, before: Tensor) -> bool:
        """Return whether each element is right or not updated, and right on some rank, as with replicas that shard."""
        whole = self.other.whole(step, "weights", name)
        if not _near(part.flat, part.of(whole)).logical_or(part.flat == before).all():
            return False
        copies = [other for _, other in self.run.parts(step, "weights", name) if other.blocks == part.blocks]
        return bool(torch.stack([_near(copy.flat, copy.of(whole)) for copy in copies]).any(0).all())

    def expect_average_when_due(self, steps: int) -> None:
        """Raise `Wrong` with the first step after which a rank sends weights although it should not, or does not."""
        every = self.trial.sync_every
        for report in self.reports:
            counts = report.facts["sent"]  # before each update, and at the end
            sent = [sum(n for kind, n in count.items() if kind not in ("loss", "control")) for count in counts]
            for step, (before, after) in enumerate(itertools.pairwise(sent)):
                is_due = (step + 1) % every == 0 or step + 1 == steps
                told = f"{self.describe(report.rank)} sends {'nothing' if is_due else 'weights'}"
                rule = f"average after every `args.sync_every` steps, here {every}, and after the last one"
                expect((after > before) == is_due, "sync-every", f"after step {step} of {steps}: {told}; {rule}")

    def expect_shared_out(self) -> None:
        """Raise `Wrong` if a rank's optimizer updates more than its share of the weights."""
        size = sum(part.flat.numel() for part in _weights_of(self.other, 0).values())
        share = -(-size // self.trial.replicas)
        for report in self.reports:
            told = f"the optimizer on {self.describe(report.rank)} updates {report.facts['updated']:,} weights"
            is_shared = report.facts["updated"] <= 1.1 * share
            expect(is_shared, "not-shared-out", f"{told} of {size:,}; its share is {share:,}")

    def expect_no_logits_sent(self, numbers: int) -> None:
        """Raise `Wrong` if a rank sends more than twice as many `numbers` of each token as the loss needs."""
        trial, slices = self.trial, self.trial.layout["tp"]
        around = 2 * trial.batch_size * self.facts["sequence_bytes"]  # after the embedding, and back from the head
        for report in self.reports:
            others = sum(
                sent
                for kind, sent in self._in_last_step(report).items()
                if not kind.startswith("layer ") and kind not in ("loss", "control")
            )
            in_a_ring = others * slices / (2 * (slices - 1))
            own = (in_a_ring - around) / 4 / (trial.batch_size * self.facts["seq_len"])
            told = f"{self.describe(report.rank)} sends {own:.0f} numbers of each token; {numbers} are enough"
            expect(own <= 2 * numbers, "logits-sent", f"the loss is right, but for it {told}")

    @staticmethod
    def _in_last_step(report: Report) -> dict[str, int]:
        """Return the bytes by kind that a rank sends from the update before the last one to the last one."""
        before, after, _ = report.facts["sent"][-3:]
        return {kind: count - before.get(kind, 0) for kind, count in after.items()}

    def sent(self) -> dict[str, tuple[int, int]]:
        """Return, by kind, the bytes that all ranks sent in the last step, and the bytes needed.

        Collectives count as around a ring over a network (`Context.ledger`), also where ranks share memory instead.
        """
        trial = self.trial
        n, stages, slices = (trial.layout.get(name, 1) for name in ("dp", "pp", "tp"))
        replica = self.reports[: len(self.reports) // n]
        weights = sum(part.flat.nbytes for one in replica for part in _weights_of(self.run, one.rank).values())
        activations = trial.batch_size * self.facts["sequence_bytes"]  # those of a replica between two blocks
        needed = {}
        if n > 1:
            needed["gradients and weights"] = 2 * (n - 1) * weights
        if stages > 1:
            needed["activations"] = 2 * n * (stages - 1) * activations
        if slices > 1:  # two all-reduces forward and two backward in each block
            needed["activations of layers"] = 2 * n * (slices - 1) * activations * 4 * self.facts["blocks"]
        kinds: dict[str, tuple[str, ...]] = {
            "gradients and weights": ("gradients", "weights"),
            "activations": ("activations", "gradients of activations"),
            "activations of layers": ("layer activations", "layer gradients"),
        }
        if needed:  # messages without a name are the pipeline's; collectives are most likely the replicas'
            kinds["activations" if stages > 1 else next(iter(needed))] += ("send",)
            kinds["gradients and weights" if n > 1 else list(needed)[-1]] += COLLECTIVES
        found = {}
        for what, least in needed.items():
            by_kind = [self._in_last_step(report).get(kind, 0) for report in self.reports for kind in kinds[what]]
            found[what] = sum(by_kind), least
        return found

    def remarks(self, sent: dict[str, tuple[int, int]]) -> list[str]:
        """Return improvements to a right solution."""
        found = [
            f"{what}: {total / least:.1f} times the bytes that are needed"
            for what, (total, least) in sent.items()
            if total > 1.05 * least
        ]
        averages = any({"gradients", *COLLECTIVES} & set(report.facts["sent"][-2]) for report in self.reports)
        if self.trial.replicas > 1 and averages and not any(report.facts["overlaps"] for report in self.reports):
            found.append("gradients are sent after the backward pass; sent during it, they take no time of their own")
        return found


def _weights_of(run: Recordings, rank: int) -> dict[str, TensorPart]:
    """Return a rank's parts of the initial weights, by name."""
    records = run.ranks(0)[rank]
    return {name: records.part("weights", name) for name in records.names("weights")}


def _near(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a, b, rtol=1e-5, atol=1e-7)
