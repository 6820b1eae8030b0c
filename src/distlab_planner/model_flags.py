"""The flags of a model, of the commands `plan` and `calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distlab.settings.common import require_positive, shown_as
from distlab.settings.experts import require_experts
from distlab_planner.layouts import WHOLE_BLOCKS
from distlab_planner.model import Dtype, Sizes
from simplellm.errors import require
from simplellm.options import check_heads, check_mixture


@dataclass
class ModelFlags:
    """The sizes of a model."""

    dmodel: int = 288
    """width of the model"""
    num_heads: int = 6
    """attention heads"""
    num_kv_heads: Annotated[int | None, shown_as("INT", "default: as many as --num-heads")] = None
    """key and value heads"""
    hidden_dim: Annotated[int | None, shown_as("INT", "default: 4 times --dmodel")] = None
    """width of the feed-forward layers"""
    seq_len: int = 256
    """tokens per sequence"""
    tokenizer: Annotated[Path | None, shown_as("FILE", "default: the shipped one")] = None
    """a SentencePiece model, whose vocabulary the embedding and the head have"""
    vocab_size: Annotated[int | None, shown_as("INT", "default: the tokenizer's")] = None
    """pieces of a tokenizer that is not there yet"""
    dtype: Dtype = "float32"
    """bfloat16 computes in mixed precision"""
    compile: bool = False
    """passes are compiled by torch.compile"""
    experts: int = 0
    """feed-forward networks in each layer, each --hidden-dim wide, of which a token uses some; 0: one for all tokens"""
    experts_per_token: int = 2
    """experts that the router chooses for each token"""
    shared_expert: bool = False
    """a further expert that sees all tokens"""
    qk_norm: bool = False
    """with --experts: normalize the queries and keys of each head"""

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self)

    def check_model(self) -> None:
        """Raise `InputError` for values that no model can have, or that the planner does not know."""
        require_positive(self, *"dmodel num_heads num_kv_heads hidden_dim vocab_size".split())
        check_heads(self.dmodel, self.num_heads, self.num_kv_heads)
        if self.experts:
            check_mixture(self.experts, self.experts_per_token)
        require_experts(self.experts, ("--qk-norm", self.qk_norm), ("--shared-expert", self.shared_expert))
        require(not (self.compile and self.experts), f"--compile with --experts {self.experts}: {WHOLE_BLOCKS}")
        require(self.seq_len > 1, f"--seq-len {self.seq_len}: predicting the next token needs at least 2")
