"""The bytes of activations that a rank keeps for backward passes, by part of the model and by action."""

import functools
from dataclasses import dataclass

from distlab.pipeline.actions import Action
from distlab_planner.layouts import RunLayout
from distlab_planner.model import FLAG_BYTES, ID_BYTES, NUMBER_BYTES, ModelPart, Sizes, share
from distlab_planner.sequences import SharedAttention


@dataclass(frozen=True)
class Kept:
    """Bytes of a micro-batch that a stage keeps."""

    all: int  # needed by a backward pass
    by_forward: int  # kept by a forward pass: with its output, without recomputed tensors
    input: int  # kept by a forward pass that keeps only its input
    factors: int  # between `BackwardInput` and `BackwardWeight`


@dataclass(frozen=True)
class Activations:
    """The activations of a micro-batch on a rank of a layout."""

    sizes: Sizes
    layout: RunLayout
    counts_outputs: bool = True  # of stages; a run counts only what autograd keeps if a script keeps them itself

    @functools.cached_property
    def attention(self) -> SharedAttention:
        """The attention of one block, as the ranks share it."""
        own = self.layout
        return SharedAttention(self.sizes, own.rows, own.size("cp"), own.cp_kind, own.cp_order, own.size("tp"))

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.layout.rows * self.attention.positions

    @property
    def residual_tokens(self) -> int:
        """Tokens of the residual stream on a rank; with sequence parallelism, slices have parts, the last padded."""
        ranks = self.layout.size("tp") if self.layout.sequence_parallel else 1
        return self.layout.rows * share(self.attention.positions, ranks)

    @property
    def between_bytes(self) -> int:
        """Bytes of the activations between two blocks."""
        return self.residual_tokens * self.sizes.dmodel * (2 if self.layout.residual == "bfloat16" else NUMBER_BYTES)

    @property
    def end_bytes(self) -> int:
        """Bytes of the same at the ends of a stage, in float32."""
        return self.residual_tokens * self.sizes.dmodel * NUMBER_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of the same in the dtype of products: between slices that add them up."""
        return self.tokens * self.sizes.dmodel * self.sizes.inner_bytes

    def kept_by(self, part: ModelPart) -> int:
        """Return the bytes that a forward pass of a part keeps, without recomputation, if no rank shares sequences."""
        sizes, width, tokens, tp = self.sizes, self.sizes.dmodel, self.tokens, self.layout.size("tp")
        if part == "embedding":  # besides the ids: if the vocabulary is shared, which rows they have here, and a mask
            return tokens * (ID_BYTES + FLAG_BYTES) * (tp > 1)
        # Input, root mean square; output.
        norm = self.between_bytes + self.residual_tokens * NUMBER_BYTES + tokens * width * sizes.inner_bytes
        compiles_casts = sizes.compiled and sizes.dtype == "bfloat16"
        # Compiled passes keep their weights in bfloat16; others cast them once more. Ranks that shard have them in it.
        casts = sizes.matrices(part) * sizes.inner_bytes * (compiles_casts and self.layout.shard == "none")
        if part == "head":  # probabilities; targets; if compiled, these once more
            ids = ID_BYTES * (1 + sizes.compiled) + FLAG_BYTES * (tp > 1)
            return norm + tokens * (NUMBER_BYTES * share(sizes.vocab_size, tp) + ids) + casts
        attention = (2 * width + 2 * sizes.kv_width) * sizes.inner_bytes + sizes.num_heads * NUMBER_BYTES
        if sizes.qk_norm:  # queries and keys in float32, and a root mean square for each head
            attention += (width + sizes.kv_width + sizes.num_heads + sizes.num_kv_heads) * NUMBER_BYTES
        inside = (4 - sizes.compiled) * sizes.network_width(tp) * sizes.inner_bytes  # the compiler computes SiLU again
        per_token = attention // tp + sizes.networks * inside + self._router_bytes
        per_token -= width * sizes.inner_bytes * compiles_casts  # the output of a norm, likewise
        in_float32 = (self.end_bytes - self.between_bytes) * sizes.compiled  # the input of the second norm
        return 2 * norm + tokens * per_token + casts + in_float32

    @property
    def _router_bytes(self) -> int:
        """Bytes for a token that a mixture of experts keeps in addition to those inside of its networks.

        Its scores, and their order; of each choice the expert, the place in both orders of rows, the score and the
        weight; the row before and after its expert; the sum of the chosen scores. In bfloat16, the router's own input.
        """
        sizes = self.sizes
        if not sizes.experts:
            return 0
        scores = sizes.experts * (NUMBER_BYTES + ID_BYTES) + NUMBER_BYTES
        choice = 3 * ID_BYTES + 2 * NUMBER_BYTES + 2 * sizes.dmodel * sizes.inner_bytes
        router_input = sizes.dmodel * NUMBER_BYTES * (sizes.inner_bytes != NUMBER_BYTES)
        return scores + sizes.experts_per_token * choice + router_input

    def factors_of(self, part: ModelPart) -> int:
        """Return the part kept between `BackwardInput` and `BackwardWeight`: inputs and gradients of linear layers."""
        sizes, width, tp = self.sizes, self.sizes.dmodel, self.layout.size("tp")
        if part == "embedding":
            return 0
        if part == "head":
            return self.tokens * sizes.inner_bytes * (width + share(sizes.vocab_size, tp))
        attention = 2 * width + (2 * width + 2 * sizes.kv_width) // tp  # inputs and gradients of its layers
        network = 2 * width + 3 * sizes.network_width(tp)
        router = (width + sizes.experts) * NUMBER_BYTES * bool(sizes.experts)
        return self.tokens * (sizes.inner_bytes * (attention + sizes.networks * network) + router)

    @functools.cached_property
    def _inside_block_bytes(self) -> int:
        """Bytes that a block keeps in addition to its input."""
        return self.kept_by("block") - self.between_bytes + self.attention.kept_bytes

    @functools.cached_property
    def _kept_attention_bytes(self) -> int:
        """Bytes of attention that a block keeps if it is computed again except for them: with the sums of scores."""
        sizes, attention = self.sizes, self.attention
        output = self.tokens * (sizes.dmodel * sizes.inner_bytes + sizes.num_heads * NUMBER_BYTES)
        kept = output // self.layout.size("tp") + attention.kept_bytes + attention.copied_bytes
        return kept * self.layout.keeps_attention

    def _own_of_micro_batch(self, stage: int) -> int:
        """Return the bytes of its ids and tables, which are views of the batch's unless ranks share sequences."""
        if self.layout.size("cp") == 1:
            return 0
        parts = self.layout.parts(stage)
        return self.tokens * ID_BYTES * parts["embedding"] + self.attention.table_bytes * bool(parts["block"])

    def _mask_bytes(self, stage: int) -> int:
        """Return the bytes of its mask, unless it is kept by the forward pass of another stage of the same worker."""
        layout = self.layout
        is_kept = layout.follows_own_blocks(stage) and (layout.recompute == "none" or layout.keeps_attention)
        return self.attention.mask_bytes if layout.split[stage] and not is_kept else 0

    def _kept_by_previous(self, stage: int) -> int:
        """Return the bytes of a stage's input that are kept as the output of the stage before, on the same worker.

        Where blocks keep their input in another dtype, or only inputs are kept, the two are not both kept.
        """
        layout = self.layout
        if layout.residual != "float32" or layout.recompute == "all" or not layout.is_handed_over(stage):
            return 0
        return self.end_bytes

    def of_stage(self, stage: int) -> Kept:
        """Return what a stage keeps, in addition to what another stage of its worker keeps."""
        layout, tokens, parts = self.layout, self.tokens, self.layout.parts(stage)
        factors = sum(count * self.factors_of(part) for part, count in parts.items())
        everything = sum(count * self.kept_by(part) for part, count in parts.items())
        mask = self._mask_bytes(stage)
        everything += parts["block"] * self.attention.kept_bytes + mask
        everything += self._own_of_micro_batch(stage) - self._kept_by_previous(stage)
        by_forward = everything + self.end_bytes * (self.counts_outputs and not parts["head"])
        if layout.recompute != "none":
            by_forward -= parts["block"] * (self._inside_block_bytes - self._kept_attention_bytes)
            by_forward -= mask * (not layout.keeps_attention)
        if layout.recompute == "all" and parts["head"]:
            by_forward -= tokens * (NUMBER_BYTES + self.sizes.dmodel * self.sizes.inner_bytes)  # only the norm's input
        input_bytes = self.end_bytes
        if parts["embedding"]:
            input_bytes = tokens * ID_BYTES if layout.size("cp") > 1 else 0
        elif layout.residual != "float32":
            everything += input_bytes  # the first block keeps a copy
        return Kept(everything, by_forward, input_bytes, factors)

    def change(self, action: Action) -> int:
        """Return the bytes that an action adds to those kept on its worker; negative if it frees them."""
        letter, kept = action.letter, self.of_stage(action.stage)
        if letter in "FfRW":
            return {"F": kept.by_forward, "f": kept.input, "R": kept.all - kept.input, "W": -kept.factors}[letter]
        before = kept.all if self._follows_recompute(action) else kept.by_forward
        return (kept.factors if letter in "Ii" else 0) - before

    def _follows_recompute(self, action: Action) -> bool:
        """Return whether a separate action has computed the activations of a backward pass again."""
        return action.letter in "BI" and self.layout.recompute == "all"

    def within(self, action: Action) -> int:
        """Return the additional bytes that a backward pass keeps while it runs, if activations are computed again."""
        parts = self.layout.parts(action.stage)
        blocks, has_head = parts["block"], parts["head"]
        if action.letter == "I" and self._follows_recompute(action) and not has_head:
            return self.message_bytes  # the gradient of the output, a factor; the output itself is not kept
        if not self.layout.computes_blocks_again(action.letter) or not (blocks or has_head):
            return 0
        is_split, kept = action.letter in "Ii", 0
        of_block, of_head = (self.factors_of(part) * is_split for part in ("block", "head"))
        if is_split and has_head and self.layout.recompute == "all":  # its norm again; blocks need more
            kept = of_head + self.between_bytes + self.residual_tokens * NUMBER_BYTES
        for done in (0, blocks - 1) if blocks else ():
            others = (blocks - done) * self.between_bytes + done * of_block
            others += (blocks - done - 1) * self._kept_attention_bytes
            others += self.message_bytes * is_split  # the gradient of the block's output, a factor
            others += self._mask_bytes(action.stage) + self._own_of_micro_batch(action.stage)
            kept = max(kept, others + self._inside_block_bytes + of_head * has_head)
        return max(0, kept - self._kept_by_previous(action.stage) - self.of_stage(action.stage).by_forward)
