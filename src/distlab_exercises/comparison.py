"""All tensors of a run on several ranks beside one process's: the first difference, and the mistake behind it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from distlab.axes.grid import Grid
from distlab.axes.layout import replica_of
from distlab_compare import shares
from distlab_compare.differences import Difference, tell
from distlab_compare.shares import Mistake
from distlab_exercises.catalogue import Trial
from distlab_exercises.ranks import Facts, Report
from distlab_exercises.verdict import Wrong, expect

# The ledger's columns of collectives that have no name, such as those of a loop over the parameters.
COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"


class Comparison:
    """All ranks' tensors beside one process's."""

    def __init__(
        self,
        trial: Trial,
        one: dict[str, Tensor],
        facts: Facts,
        lr: float,
        reports: list[Report],
        folder: Path,
    ) -> None:
        self.trial, self.one, self.facts, self.lr, self.reports = trial, one, facts, lr, reports
        self.steps, self.describe = len(facts["losses"]), Grid(0, trial.layout).describe
        self.ranks = [load_file(folder / f"rank{report.rank}.safetensors") for report in reports]
        self.member = "pipeline" if trial.layout.get("pp", 1) > 1 else "replica"
        if len(reports) == trial.replicas:
            self.member = "rank"

    def expect_one_process(self, losses: list[float], weights_only: bool) -> None:
        """Raise `Wrong` with the first step in which something differs, and a description."""
        self._expect_all_parameters()
        self._expect_right_start()
        for step in range(self.steps):
            self._expect_loss(step, losses)
            kinds = [] if weights_only else [("gradient", self._gradient_mistake)]
            for kind, name_mistake in [*kinds, ("weights", self._weights_mistake)]:
                if found := self._differences(kind, step, name_mistake):
                    raise Wrong(found[0].mistake.name, *self._tell(kind, step, found))

    def expect_right_data(self) -> None:
        """Raise `Wrong` with the first step in which a rank has other sequences than its own."""
        right = self.facts["tokens"]  # by step and replica
        for step in range(self.steps):
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
        return f"sequences of none of the steps up to {self.steps - 1}"

    def _expect_all_parameters(self) -> None:
        held = {name.split("|")[2] for tensors in self.ranks for name in tensors}
        for name in self.facts["names"]:
            expect(name in held, "parameters", f"no rank holds the parameter {name}")
        for report in self.reports:
            times = f"{self.describe(report.rank)} updated its weights {report.facts['updates']} times"
            expect(report.facts["updates"] == self.steps, "parameters", f"{times} in {self.steps} steps")

    def _expect_right_start(self) -> None:
        for name in self.facts["names"]:
            for rank, tensors in enumerate(self.ranks):
                own = tensors.get(f"weights|0|{name}")
                if own is None or not self._is_wrong_at_start(rank, name, own):
                    continue
                if not self._is_wrong_at_start(rank, name, tensors[f"start|0|{name}"]):
                    told = f"step 0: something has changed the weights {name} on {self.describe(rank)}"
                    raise Wrong("changed-early", f"{told} before optimizer.step(), which alone should change them")
                told = f"before step 0: the weights {name} on {self.describe(rank)} are not those of one process"
                expect(self.trial.replicas == 1, "not-broadcast", f"{told}; all ranks must start from rank 0's")
                raise Wrong("wrong-start", told)

    def _expect_loss(self, step: int, losses: list[float]) -> None:
        n, m, expected = self.trial.replicas, self.trial.micro_batches, self.facts["losses"][step]
        called = f"run.log(step, losses) was called in {len(losses)} of {self.steps} steps"
        expect(step < len(losses), "steps", called)
        given = sum(report.facts["logged"][step] for report in self.reports)
        told = f"step {step}: no rank gave run.log a loss: put that of each micro-batch into `losses`"
        expect(given > 0, "no-loss", told)
        if abs(losses[step] - expected) > 1e-4 * abs(expected):
            mistake = shares.name_loss(losses[step], expected, n, m)
            told = f"{losses[step]:.6f} instead of {expected:.6f}"
            sentence = mistake.sentence
            if self._has_right_gradients(step):
                sentence += "; the gradients are right, so only the loss that run.log prints is wrong"
            elif mistake.name == "loss" and self.trial.layout.get("pp", 1) > 1:
                sentence += ", or a stage gets activations that are not final"
            raise Wrong(mistake.name, f"the loss of step {step} {sentence} ({told})")

    def _has_right_gradients(self, step: int) -> bool:
        recorded = any(key.startswith(f"gradient|{step}|") for tensors in self.ranks for key in tensors)
        return recorded and not self._differences("gradient", step, lambda *_: Mistake("", ""))

    def _own(self, rank: int, name: str, whole: Tensor) -> Tensor:
        """Return the part of a tensor that a rank should hold: the slice of its parameter, or all."""
        if (own := self.reports[rank].facts["slices"].get(name)) is None:
            return whole
        dim, start, *_ = own
        return whole.narrow(dim, start, self.ranks[rank][f"weights|0|{name}"].shape[dim])

    def _is_wrong_at_start(self, rank: int, name: str, own: Tensor) -> bool:
        right = self._own(rank, name, self.one[f"weights|0|{name}"])
        return own.shape != right.shape or shares.differs(own, right)

    def _shares(self, rank: int, step: int, name: str) -> list[list[Tensor]]:
        key = f"share|{step}|{name}|{{}}|{{}}".format
        n, m = self.trial.replicas, self.trial.micro_batches
        return [[self._own(rank, name, self.one[key(r, k)]) for k in range(m)] for r in range(n)]

    def _gradient(self, rank: int, step: int, name: str) -> Tensor:
        rows = self._shares(rank, step, name)
        return torch.stack([share for row in rows for share in row]).mean(0)

    def _replica(self, rank: int, key: str) -> int:
        """Return the number of a rank's replica; -1 if all replicas have the same tensor."""
        replica = replica_of(self.trial.layout, rank)
        own, ranks_each = self.ranks[rank][key], len(self.ranks) // self.trial.replicas
        alike = self.ranks[rank % ranks_each :: ranks_each]  # the ranks that hold the same parameters
        same = all(not shares.differs(tensors.get(key, own), own) for tensors in alike)
        return -1 if same and self.trial.replicas > 1 else replica

    def _differences(
        self, kind: str, step: int, name_mistake: Callable[[int, int, str, Tensor], Mistake]
    ) -> list[Difference]:
        found = []
        for rank, tensors in enumerate(self.ranks):
            at = step if kind == "gradient" else step + 1
            for name in (key.split("|")[2] for key in tensors if key.startswith(f"{kind}|{at}|")):
                own = tensors[f"{kind}|{at}|{name}"]
                right = (
                    self._gradient(rank, step, name)
                    if kind == "gradient"
                    else self._own(rank, name, self.one[f"weights|{at}|{name}"])
                )
                if own.shape != right.shape:
                    mistake = Mistake("shape", f"is {tuple(own.shape)}, and should be {tuple(right.shape)}")
                    found.append(Difference(step, rank, name, mistake))
                elif shares.differs(own, right):
                    found.append(Difference(step, rank, name, name_mistake(rank, step, name, own)))
        order = {name: index for index, name in enumerate(self.facts["names"])}
        return sorted(found, key=lambda difference: (difference.rank, order[difference.name]))

    def _gradient_mistake(self, rank: int, step: int, name: str, own: Tensor) -> Mistake:
        before = self._gradient(rank, step - 1, name) if step else None
        replica = self._replica(rank, f"gradient|{step}|{name}")
        found = shares.name_gradient(own, self._shares(rank, step, name), before, replica, self.member)
        if found.name != "other":
            return found
        right, key = self._gradient(rank, step, name), f"gradient|{step}|{name}"
        mine = replica_of(self.trial.layout, rank)
        copies = [
            tensors[key]
            for other, tensors in enumerate(self.ranks)
            if key in tensors and replica_of(self.trial.layout, other) == mine
        ]
        is_copy = name not in self.reports[rank].facts["slices"] and len(copies) > 1
        if is_copy and not shares.differs(torch.stack(copies).sum(0), right):
            told = f"is a part of the gradient: only the sum over the {len(copies)} ranks that hold copies is right"
            return Mistake("part", told)
        ratio = float(own.norm() / right.norm().clamp_min(1e-30))
        detail = f"; its norm is {ratio:.2f} times that of the right one"
        if is_copy and any(shares.differs(other, own) for other in copies):
            detail += ", and ranks that hold copies have different ones"
        return Mistake(found.name, found.sentence, detail)

    def _weights_mistake(self, rank: int, step: int, name: str, own: Tensor) -> Mistake:
        before = self._own(rank, name, self.one[f"weights|{step}|{name}"])
        if self._is_elsewhere(step, name, own, before):
            told = "are those before the update, or some of them are: what another rank has updated did not arrive"
            return Mistake("not-gathered", told)
        rows = self._shares(rank, step, name)
        replica = self._replica(rank, f"weights|{step + 1}|{name}")
        return shares.name_weights(own, before, rows, self.lr, replica, self.member)

    def _is_elsewhere(self, step: int, name: str, own: Tensor, before: Tensor) -> bool:
        """Return whether each element is right or not updated, and right on some rank, as with replicas that shard."""
        right = self.one[f"weights|{step + 1}|{name}"]
        if own.shape != right.shape or not self._near(own, right).logical_or(own == before).all():
            return False
        somewhere = torch.zeros_like(own, dtype=torch.bool)
        for tensors in self.ranks:
            other = tensors.get(f"weights|{step + 1}|{name}", before)
            somewhere |= self._near(other, right) if other.shape == right.shape else False
        return bool(somewhere.all())

    @staticmethod
    def _near(a: Tensor, b: Tensor) -> Tensor:
        return torch.isclose(a, b, rtol=1e-5, atol=1e-7)

    def _tell(self, kind: str, step: int, found: list[Difference]) -> list[str]:
        when = f"step {step}: the gradient of" if kind == "gradient" else f"after step {step}: the weights"
        held = [{key.split("|")[2] for key in tensors} for tensors in self.ranks]
        return tell(when, found, self.describe, held)

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
        size = sum(tensor.numel() for key, tensor in self.one.items() if key.startswith("weights|0|"))
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
        weights = sum(
            tensor.nbytes
            for report in replica
            for key, tensor in self.ranks[report.rank].items()
            if key.startswith("weights|0|")
        )
        activations = trial.batch_size * self.facts["sequence_bytes"]  # those of a replica between two blocks
        needed = {}
        if n > 1:
            needed["gradients and weights"] = 2 * (n - 1) * weights
        if stages > 1:
            needed["activations"] = 2 * n * (stages - 1) * activations
        if slices > 1:  # two all-reduces forward and two backward in each block
            all_reduces = 4 * self.facts["blocks"]
            are_unnamed = any(set(COLLECTIVES) & set(report.facts["sent"][-2]) for report in self.reports)
            if n == 1 and are_unnamed and any("embed_tokens" in name for name in self.reports[0].facts["slices"]):
                all_reduces += 2  # after the embedding and back from the head, which then have no name either
            needed["activations of layers"] = n * stages * 2 * (slices - 1) * activations * all_reduces
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
