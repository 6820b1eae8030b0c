"""The museum's exhibits mended, and wrong mends of each: changes of the script, and what is observed then."""

from dataclasses import dataclass

Changes = tuple[tuple[str, str], ...]  # texts that are replaced, each of which the script has once


@dataclass(frozen=True)
class Mend:
    exhibit: str
    changes: Changes
    says: str = ""  # a part of the sentence about it; "" if it is right
    also: str = ""  # a part of a further sentence


AVERAGE = "            parameter.grad /= run.world_size\n"
MLP_BELOW = "return x + ReduceFrom.apply(self.mlp(self.post_attention_layernorm(x)))"
PREDICTIONS = """            predictions = max(1, int((~ignored).sum()))
            loss = next_token_loss(net(ids), ids.roll(-1, dims=1), ignored, predictions) / args.micro_batches
"""
COUNTED = """        total = (~without_label(batch, stop)).sum()
        dist.all_reduce(total)
"""
ZERO_GRAD = "        optimizer.zero_grad()\n        losses = []\n"
BY_COUNT = "            loss = next_token_loss(net(ids), ids.roll(-1, dims=1), ignored, float(total))"
GENERATOR = "generator = torch.Generator().manual_seed(args.seed)"
GROUPS = "replicas, _ = dist.new_subgroups_by_enumeration(ranks.tolist())"
ROUTER = 'if parameter.requires_grad and ".mlp." not in name'
POSITION = "self.position += self.batch_size\n"
BACKWARD = "        loss.backward()\n        losses.append(loss / micro_batches)\n"
LABELS = "labels = ids.roll(-1, dims=1)"
PACKED = "return SequencePart(positions, attend_to_earlier)"
SQUARE = "dist.all_reduce(square, ReduceOp.AVG)"

MENDS = [
    Mend("experts", (("gradient /= holders", "gradient /= dist.get_world_size()"),)),
    Mend(
        "experts",
        (("gradient /= holders", "gradient /= holders * dist.get_world_size()"),),
        "model.embed_tokens.weight and",
    ),
    Mend("experts", (("1 if is_expert else run.world_size", "run.world_size"),), "is no combination of the 2 ranks'"),
    Mend("clipping", ((SQUARE, "dist.all_reduce(square)"),)),
    Mend("clipping", ((SQUARE, "dist.all_reduce(square, ReduceOp.MAX)"),), "times what it should be"),
    Mend("clipping", ((SQUARE, ""),), "after step 0: the weights"),
    Mend(
        "micro_batches",
        ((BACKWARD, "        loss /= micro_batches\n        loss.backward()\n        losses = [loss]\n"),),
    ),
    Mend("micro_batches", (("losses.append(loss / micro_batches)", "losses.append(loss)"),), "the loss of step 0 is 3"),
    Mend(
        "micro_batches",
        (("dist.send(inputs.grad, stage - 1)", "dist.send(inputs.grad / micro_batches, stage - 1)"),),
        "rank 1 (stage 1) is 3 times too large",
    ),
    Mend("routers", ((ROUTER, 'if parameter.requires_grad and ".experts." not in name'),)),
    Mend("routers", ((ROUTER, "if parameter.requires_grad"),), "is no combination of the 2 ranks'"),
    Mend(
        "routers",
        (
            (
                "run.log(step, [loss])",
                "run.log(step, [loss])\n        for name, p in net.named_parameters():\n            "
                'if "gate.weight" in name:\n                dist.broadcast(p.grad, 0)',
            ),
        ),
        "looks as if rank 1's share was lost",
    ),
    Mend(
        "slices",
        (
            (
                MLP_BELOW,
                MLP_BELOW.replace("self.post_attention_layernorm(x)", "CopyTo.apply(self.post_attention_layernorm(x))"),
            ),
        ),
    ),
    Mend(
        "slices",
        (
            (
                MLP_BELOW,
                MLP_BELOW.replace("self.post_attention_layernorm(x)", "self.post_attention_layernorm(CopyTo.apply(x))"),
            ),
        ),
        "only the sum over the 2 ranks",
    ),
    Mend(
        "slices",
        ((MLP_BELOW, "return CopyTo.apply(x) + " + MLP_BELOW.removeprefix("return x + ")),),
        "step 0: the gradient of",
        also="times that of the right one, and ranks that hold copies have different ones",
    ),
    Mend("groups", ((GROUPS, GROUPS.replace("ranks", "ranks.T")),)),
    Mend("groups", (("ReduceOp.AVG, replicas)", "ReduceOp.AVG)"),), "is no combination of the 2 replicas'"),
    Mend(
        "groups",
        ((GROUPS, GROUPS.replace("ranks", "ranks.T")), ("ReduceOp.AVG, replicas)", "ReduceOp.SUM, replicas)")),
        "2 times too large",
    ),
    Mend("labels", ((LABELS, "labels = batch.roll(-1, dims=1)[:, own]"),)),
    Mend("labels", ((LABELS, "labels = batch[:, (own + 1).clamp(max=own[-1])]"),), "the loss of step 0"),
    Mend("labels", ((LABELS, LABELS + "\n        labels[:, -1] = 0"),), "other numbers went into it"),
    Mend(
        "documents",
        (
            ("import SequencePart, attend_to_earlier", "import SequencePart, attend_with"),
            (
                PACKED,
                "same = documents.unsqueeze(-1) == documents.unsqueeze(-2)\n    "
                "return SequencePart(positions, attend_with(same.tril().unsqueeze(1)))",
            ),
        ),
    ),
    Mend(
        "documents",
        (
            ("import SequencePart, attend_to_earlier", "import SequencePart, attend_with"),
            (
                PACKED,
                "same = documents.unsqueeze(-1) == documents.unsqueeze(-2)\n    "
                "return SequencePart(positions, attend_with(same.unsqueeze(1)))",
            ),
        ),
        "is no combination of the 2 ranks' gradients",
    ),
    Mend(
        "documents",
        (("net(ids, part=packed(ids, tokenizer.eos_id))", "net(ids)"),),
        "is no combination of the 2 ranks' gradients",
    ),
    Mend("accumulation", ((ZERO_GRAD, ZERO_GRAD + COUNTED), (PREDICTIONS, BY_COUNT + " * run.world_size\n"))),
    Mend(
        "accumulation",
        ((ZERO_GRAD, ZERO_GRAD + COUNTED), (PREDICTIONS, BY_COUNT + "\n"), (AVERAGE, "")),
        "is 1/2 of what it should be: divided by 2 micro-batches or 2 replicas twice; the gradients are right",
    ),
    Mend(
        "accumulation",
        (
            (ZERO_GRAD, ZERO_GRAD + COUNTED.replace("        dist.all_reduce(total)\n", "")),
            (PREDICTIONS, BY_COUNT + "\n"),
        ),
        "weighs the ranks' shares differently",
    ),
    Mend("shared_weight", (("        x = y\n", "        x = y.detach().requires_grad_()\n"),)),
    Mend("shared_weight", (("        x = y\n", "        x = y.detach()\n"),), "failed"),
    Mend(
        "shared_weight",
        (
            ("weight.grad = own if weight.grad is None else weight.grad + own", "weight.grad = own"),
            ("zip(saved, gradients[-len(saved) :], strict=True)", "reversed([*zip(saved, gradients[-len(saved) :])])"),
        ),
        "its norm is 0.",
    ),
    Mend("resume", ((POSITION, "self.position += self.batch_size * dist.get_world_size()\n"),)),
    Mend("resume", ((POSITION, "self.position += 1\n"),), "step 2: rank 0 has"),
    Mend(
        "resume",
        (("        for _ in itertools.islice(self.sequences, self.position):\n            pass\n", ""),),
        "the sequences of rank 0 in step 0",
    ),
    Mend("seeds", ((GENERATOR, "generator = torch.Generator().manual_seed(args.seed + run.rank)"),)),
    Mend(
        "seeds",
        ((".normal_(0, 0.02, generator=generator)", ".normal_(0, 0.02 * (1 + dist.get_rank()), generator=generator)"),),
        "the same but for their scale",
    ),
    Mend(
        "seeds",
        (
            (
                GENERATOR,
                GENERATOR + "\n    for parameter in net.parameters():\n        "
                "torch.nn.init.normal_(parameter, 0, 0.02, generator=generator.manual_seed(run.rank))",
            ),
        ),
        "the copies of",
    ),
]
