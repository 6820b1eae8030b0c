"""The settings of models with a mixture of experts, and of runs whose ranks share the experts."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from distlab.settings.common import WorldSize
from distlab.settings.resume_policy import ResumePolicy
from distlab.settings.training import TrainSettings
from simplellm.errors import require
from simplellm.options import RouterScores


def require_experts(experts: int, *flags: tuple[str, bool]) -> None:
    """Raise `InputError` for the first of the flags that is given for a model without experts."""
    for flag, is_given in flags:
        require(experts > 0 or not is_given, f"{flag}: it is for models with experts; give --experts")


@dataclass
class ExpertSettings:
    """The sizes of a mixture of experts, and the balance of their load."""

    experts: Annotated[int, ResumePolicy.MODEL] = 0
    """feed-forward networks in each layer, each --hidden-dim wide, of which a token uses some; 0: one for all tokens"""
    experts_per_token: Annotated[int, ResumePolicy.MODEL] = 2
    """experts that the router chooses for each token"""
    shared_expert: Annotated[bool, ResumePolicy.MODEL] = False
    """a further expert that sees all tokens"""
    router_scores: Annotated[RouterScores, ResumePolicy.MODEL] = "softmax"
    """how the scores of experts follow from the router's logits"""
    qk_norm: Annotated[bool, ResumePolicy.MODEL] = False
    """with --experts: normalize the queries and keys of each head, as in Qwen3-MoE"""
    capacity: Annotated[float, ResumePolicy.DEFAULT] = 0
    """most rows that an expert takes of each sequence in training, times the mean; others are dropped; 0: no limit"""
    balance_rate: Annotated[float, ResumePolicy.DEFAULT] = 0.003
    """change of an expert's correction after each step, towards equal loads; 0: no balance"""

    def mixture_options(self) -> dict[str, Any]:
        """Return the keyword arguments of models in `simplellm.llama` for these settings; none without experts."""
        names = "experts", "experts_per_token", "shared_expert", "router_scores", "qk_norm"
        return {name: getattr(self, name) for name in names} if self.experts else {}

    def check_experts(self, ranks: int, flag: str) -> None:
        """Raise `InputError` unless `ranks`, which `flag` sets, can share the experts."""
        given = f"{flag} {ranks} with --experts {self.experts}"
        require(self.experts >= 0, f"--experts {self.experts}: give 0 or more")
        require(self.experts_per_token > 0, f"--experts-per-token {self.experts_per_token}: must be greater than 0")
        if self.experts:
            most, chosen = self.experts, f"--experts-per-token {self.experts_per_token} with --experts {self.experts}"
            require(self.experts_per_token <= most, f"{chosen}: give a number from 1 to {most}")
            advice = "each rank holds as many experts as the others; give a divisor"
            require(ranks > 0 and self.experts % ranks == 0, f"{given}: {advice}")
        require(self.experts > 0 or ranks == 1, f"{given}: there are no experts to share; give --experts")
        scores = f"--router-scores {self.router_scores}", self.router_scores != "softmax"
        require_experts(self.experts, ("--qk-norm", self.qk_norm), ("--shared-expert", self.shared_expert), scores)
        given = f"--capacity {self.capacity:g}"
        require(self.capacity == 0 or self.experts > 0, f"{given}: there are no experts to limit; give --experts")
        require(0 <= self.capacity < math.inf, f"{given}: give 0 for no limit, or a number above it, such as 1.25")
        require(0 <= self.balance_rate <= 1, f"--balance-rate {self.balance_rate:g}: give a number from 0 to 1")


@dataclass
class ExpertParallelSettings(ExpertSettings, WorldSize, TrainSettings):
    """A run whose ranks share the experts, and have `--batch-size` sequences each."""

    axis = "ep"

    world_size: int = 2
    """ranks, each with some of the experts, all other weights, and sequences of its own"""
    batch_size: int = 1
    experts: Annotated[int, ResumePolicy.MODEL] = 4
    lacks: ClassVar[dict[str, object]] = {"outer": "none"}

    def check(self) -> None:
        super().check()
        require(self.experts > 0, f"--experts {self.experts}: this script is about experts; give 1 or more")
        self.check_experts(self.world_size, "--world-size")
