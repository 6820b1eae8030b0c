"""The museum's exhibits: the layout in which each is tried, its one process, and the lines at fault. Needs no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from distlab.run.commands import LAB
from distlab_exercises.catalogue import USUAL, OneProcess, Trial
from simplellm.errors import require

MUSEUM = LAB / "museum"


@dataclass(frozen=True)
class Exhibit:
    """A script with one fault of the real world in it, which does not show in its loss."""

    name: str  # of its folder and of its script
    title: str
    source: str  # where the fault was reported: project and number
    trial: Trial
    faults: tuple[str, ...]  # the lines of the script at which the fault can be corrected
    hint: str  # for those who name another line
    one_process: OneProcess = USUAL
    weights_only: bool = False  # compare no gradients: a rank has them of its part only
    stops_after: int = 0  # steps after which the run is stopped and resumed; 0: it is not
    own_start: bool = False  # the initial weights are the script's own

    @property
    def trials(self) -> tuple[Trial, ...]:
        return (self.trial,)

    @property
    def script(self) -> Path:
        return MUSEUM / self.name / f"{self.name}.py"

    def lines(self) -> list[str]:
        """Return the lines of the script as it hangs in the museum."""
        require(self.script.exists(), f"{self.script}: does not exist; the museum is in the lab's checkout")
        return self.script.read_text().splitlines()

    def is_at_fault(self, line: str) -> bool:
        return re.sub(r"\s+#.*", "", line.strip()) in self.faults


EXHIBITS = {  # in the order of the chapters that they need, as in museum/README.md
    exhibit.name: exhibit
    for exhibit in (
        Exhibit(
            "documents",
            "several documents in a sequence",
            "huggingface/trl#6843",
            Trial({"dp": 2}),
            ("return SequencePart(positions, attend_to_earlier)",),
            "Which keys does the first token of the second document attend to?",
            OneProcess((("seq_len", 256),), masks_documents=True),
        ),
        Exhibit(
            "accumulation",
            "answers of different lengths in micro-batches",
            "huggingface/transformers#34191",
            Trial({"dp": 2}, 4, 2),
            (
                "predictions = max(1, int((~ignored).sum()))",
                "loss = next_token_loss(net(ids), ids.roll(-1, dims=1), ignored, predictions) / args.micro_batches",
            ),
            "Two micro-batches have 5 and 40 tokens to predict. How much does each token count?",
            OneProcess(first_sentences=True),
        ),
        Exhibit(
            "micro_batches",
            "a pipeline that divides its loss",
            "pytorch/torchtitan#4194",
            Trial({"pp": 2}, 3, 3),
            ("loss.backward()", "losses.append(loss / micro_batches)"),
            "The printed loss is right. Are the gradients computed from it?",
        ),
        Exhibit(
            "shared_weight",
            "a weight in two layers, and a backward pass in two parts",
            "pytorch/pytorch#180952",
            Trial({"pp": 2}),
            ("x = y", "saved.append((layer, x, y))", "weight.grad = own if weight.grad is None else weight.grad + own"),
            "How many paths lead from the output of the upper layer to the shared weight, and who follows each?",
            OneProcess(
                (("n_layers", 4),),
                shared=(
                    ("model.layers.1.mlp", "model.layers.0.mlp"),
                    ("model.layers.3.mlp", "model.layers.2.mlp"),
                ),
            ),
        ),
        Exhibit(
            "slices",
            "heads and hidden units on two ranks",
            "pytorch/torchtitan#4054",
            Trial({"tp": 2}),
            ("return x + ReduceFrom.apply(self.mlp(self.post_attention_layernorm(x)))",),
            "The forward pass is right. Which sum does the backward pass need below each layer that is split?",
        ),
        Exhibit(
            "seeds",
            "an MLP whose slices the ranks initialize",
            "allenai/OLMo-core#307",
            Trial({"tp": 2}),
            ("generator = torch.Generator().manual_seed(args.seed)",),
            "Compare the weights of two ranks before the first step. What should be equal, and what should not?",
            own_start=True,
        ),
        Exhibit(
            "groups",
            "a grid of replicas and slices",
            "ByteDance-Seed/VeOmni#1115",
            Trial({"dp": 2, "pp": 1, "tp": 2}),
            (
                "ranks = torch.arange(run.world_size).view(args.dp, args.tp)",
                "replicas, _ = dist.new_subgroups_by_enumeration(ranks.tolist())",
                "dist.all_reduce(parameter.grad, ReduceOp.AVG, replicas)",
            ),
            "Write down which ranks average their gradients, and what each of them holds.",
        ),
        Exhibit(
            "clipping",
            "clipped gradients, each rank with a range of them",
            "deepspeedai/DeepSpeed#8475",
            Trial({"dp": 3}, settings={"clip_norm": 0.1}),
            ("dist.all_reduce(square, ReduceOp.AVG)",),
            "What does each rank know about the norm of all gradients, and what is made of it?",
            OneProcess(clip_norm=0.1),
            weights_only=True,
        ),
        Exhibit(
            "resume",
            "a loader that goes on where it stopped",
            "huggingface/accelerate#2016",
            Trial({"dp": 2}, settings={"hidden_dim": 64}),
            ("self.position += self.batch_size", "for _ in itertools.islice(self.sequences, self.position):"),
            "How many sequences have all ranks taken in a step, and by how many does the position move?",
            stops_after=2,
        ),
        Exhibit(
            "labels",
            "sequences in two parts",
            "verl-project/verl#5983",
            Trial({"cp": 2}),
            ("labels = ids.roll(-1, dims=1)", "ids = batch[:, own]"),
            "What does the last position of the first rank predict?",
        ),
        Exhibit(
            "experts",
            "four experts on two ranks",
            "NVIDIA/Megatron-LM#5956",
            Trial({"ep": 2}),
            ("gradient /= holders", "average(parameter.grad, 1 if is_expert else run.world_size)"),
            "Which tokens are in the gradient of an expert, and which in the gradient of the embedding?",
            OneProcess(mixture=True),
        ),
        Exhibit(
            "routers",
            "a router on two ranks",
            "pytorch/torchtitan#2387",
            Trial({"ep": 2}),
            ('if parameter.requires_grad and ".mlp." not in name', "for name, parameter in net.named_parameters()"),
            "Which parameters do both ranks hold, and which of them have the same gradient on both in the end?",
            OneProcess(mixture=True),
        ),
    )
}
