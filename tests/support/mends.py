"""The museum's exhibits mended, and wrong mends of each: changes of the script, and what is observed then."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mend:
    changes: Mapping[str, str]  # old and new texts; the script has each old one once
    says: str = ""  # a part of the sentence about it; "" if it is right
    also: str = ""  # a part of a further sentence
    elsewhere: tuple[str, ...] = ()  # other lines at which the fault can be corrected as well


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

MENDS = {
    "experts": [
        Mend(
            {"gradient /= holders": "gradient /= dist.get_world_size()"},
            elsewhere=("average(parameter.grad, 1 if is_expert else run.world_size)",),
        ),
        Mend({"gradient /= holders": "gradient /= holders * dist.get_world_size()"}, "model.embed_tokens.weight and"),
        Mend({"1 if is_expert else run.world_size": "run.world_size"}, "is no combination of the 2 ranks'"),
    ],
    "clipping": [
        Mend({SQUARE: "dist.all_reduce(square)"}),
        Mend({SQUARE: ""}, "after step 0: the weights"),
    ],
    "micro_batches": [
        Mend(
            {BACKWARD: "        loss /= micro_batches\n        loss.backward()\n        losses = [loss]\n"},
            elsewhere=("loss.backward()",),
        ),
        Mend({"losses.append(loss / micro_batches)": "losses.append(loss)"}, "the loss of step 0 is 3"),
        Mend(
            {"dist.send(inputs.grad, stage - 1)": "dist.send(inputs.grad / micro_batches, stage - 1)"},
            "rank 1 (stage 1) is 3 times too large",
        ),
    ],
    "routers": [
        Mend(
            {ROUTER: 'if parameter.requires_grad and ".experts." not in name'},
            elsewhere=("for name, parameter in net.named_parameters()",),
        ),
        Mend({ROUTER: "if parameter.requires_grad"}, "gate_proj.weight and 23 other parameters on all ranks is no"),
    ],
    "slices": [
        Mend(
            {
                MLP_BELOW: (
                    MLP_BELOW.replace(
                        "self.post_attention_layernorm(x)", "CopyTo.apply(self.post_attention_layernorm(x))"
                    )
                )
            }
        ),
        Mend(
            {
                MLP_BELOW: (
                    MLP_BELOW.replace(
                        "self.post_attention_layernorm(x)", "self.post_attention_layernorm(CopyTo.apply(x))"
                    )
                )
            },
            "only the sum over the 2 ranks",
        ),
        Mend(
            {MLP_BELOW: "return CopyTo.apply(x) + " + MLP_BELOW.removeprefix("return x + ")},
            "step 0: the gradient of",
            also="times that of the right one, and ranks that hold copies have different ones",
        ),
    ],
    "groups": [
        Mend(
            {GROUPS: GROUPS.replace("ranks", "ranks.T")},
            elsewhere=(
                "ranks = torch.arange(run.world_size).view(args.dp, args.tp)",
                "dist.all_reduce(parameter.grad, ReduceOp.AVG, replicas)",
            ),
        ),
        Mend({"ReduceOp.AVG, replicas)": "ReduceOp.AVG)"}, "is no combination of the 2 replicas'"),
        Mend(
            {GROUPS: GROUPS.replace("ranks", "ranks.T"), "ReduceOp.AVG, replicas)": "ReduceOp.SUM, replicas)"},
            "2 times too large",
        ),
    ],
    "labels": [
        Mend({LABELS: "labels = batch.roll(-1, dims=1)[:, own]"}, elsewhere=("ids = batch[:, own]",)),
        Mend({LABELS: "labels = batch[:, (own + 1).clamp(max=own[-1])]"}, "the loss of step 0"),
        Mend({LABELS: LABELS + "\n        labels[:, -1] = 0"}, "other numbers went into it"),
    ],
    "documents": [
        Mend(
            {
                "import SequencePart, attend_to_earlier": "import SequencePart, attend_with",
                PACKED: (
                    "same = documents.unsqueeze(-1) == documents.unsqueeze(-2)\n    "
                    "return SequencePart(positions, attend_with(same.tril().unsqueeze(1)))"
                ),
            }
        ),
        Mend(
            {"net(ids, part=packed(ids, tokenizer.eos_id))": "net(ids)"}, "is no combination of the 2 ranks' gradients"
        ),
    ],
    "accumulation": [
        Mend({ZERO_GRAD: ZERO_GRAD + COUNTED, PREDICTIONS: BY_COUNT + " * run.world_size\n"}),
        Mend(
            {ZERO_GRAD: ZERO_GRAD + COUNTED, PREDICTIONS: BY_COUNT + "\n", AVERAGE: ""},
            "is 1/2 of what it should be: divided by 2 micro-batches or 2 replicas twice; the gradients are right",
        ),
        Mend(
            {
                ZERO_GRAD: ZERO_GRAD + COUNTED.replace("        dist.all_reduce(total)\n", ""),
                PREDICTIONS: BY_COUNT + "\n",
            },
            "weighs the ranks' shares differently",
        ),
    ],
    "shared_weight": [
        Mend(
            {"        x = y\n": "        x = y.detach().requires_grad_()\n"},
            elsewhere=(
                "saved.append((layer, x, y))",
                "weight.grad = own if weight.grad is None else weight.grad + own",
            ),
        ),
        Mend({"        x = y\n": "        x = y.detach()\n"}, "failed"),
        Mend(
            {
                "weight.grad = own if weight.grad is None else weight.grad + own": "weight.grad = own",
                "zip(saved, gradients[-len(saved) :], strict=True)": (
                    "reversed([*zip(saved, gradients[-len(saved) :])])"
                ),
            },
            "its norm is 0.",
        ),
    ],
    "resume": [
        Mend(
            {POSITION: "self.position += self.batch_size * dist.get_world_size()\n"},
            elsewhere=("for _ in itertools.islice(self.sequences, self.position):",),
        ),
        Mend(
            {"        for _ in itertools.islice(self.sequences, self.position):\n            pass\n": ""},
            "the sequences of rank 0 in step 0",
        ),
    ],
    "seeds": [
        Mend({GENERATOR: "generator = torch.Generator().manual_seed(args.seed + run.rank)"}),
        Mend(
            {
                ".normal_(0, 0.02, generator=generator)": (
                    ".normal_(0, 0.02 * (1 + dist.get_rank()), generator=generator)"
                )
            },
            "the same but for their scale",
        ),
        Mend(
            {
                GENERATOR: (
                    GENERATOR + "\n    for parameter in net.parameters():\n        "
                    "torch.nn.init.normal_(parameter, 0, 0.02, generator=generator.manual_seed(run.rank))"
                )
            },
            "the copies of",
        ),
    ],
}
