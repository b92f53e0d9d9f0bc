"""What the study runs, as data: docs/study-design.md says why. A run's name is its log's, results/NAME.json.gz."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

SEEDS = 3
"""Of every cell. Raise it, and `bash studies/run.sh` runs what is missing."""
STEPS = 400

GTPO = ("algorithm.adv_estimator=gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gtpo")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
_NO_ENTROPY = ("algorithm.gtpo.entropy_coeff=0", "algorithm.gtpo.completion_filter=never")
_PAPER_BETAS = (
    "actor_rollout_ref.actor.optim.betas=[0.999999,0.999999]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)


def _gtpo(**keys: object) -> tuple[str, ...]:
    return (*GTPO, *(f"++algorithm.gtpo.{key}={value}" for key, value in keys.items()))


def _reward(name: str) -> tuple[str, ...]:
    return (f"reward.custom_reward_function.name={name}",)


METHODS: dict[str, tuple[str, ...]] = {
    "grpo": GRPO,  # aggregated as in the paper, `seq-mean-token-mean`
    "grpo_token_mean": (*GRPO, "actor_rollout_ref.actor.loss_agg_mode=token-mean"),
    "grpo_kl": (*GRPO, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.04"),
    "gtpo": GTPO,
    # The parts of GTPO.
    "masks": (*GTPO, *_NO_ENTROPY),
    "forward": (*_gtpo(conflict_masks="forward"), *_NO_ENTROPY),
    "backward": (*_gtpo(conflict_masks="backward"), *_NO_ENTROPY),
    "skip": (*_gtpo(conflict_weight_positive=1), *_NO_ENTROPY),  # λ = 0, 1
    "double": (*_gtpo(conflict_weight_negative=1), *_NO_ENTROPY),  # λ = 1, 2
    "entropy": _gtpo(conflict_span="none"),  # the filter and γ
    "filter": _gtpo(conflict_span="none", entropy_coeff=0),
    "gamma": _gtpo(conflict_span="none", completion_filter="never"),
    "gtpo_no_filter": _gtpo(completion_filter="never"),
    "only_negative": _gtpo(filter_scope="negative"),  # OnlyNeg of Fig. 4c
    # Controls.
    "positive_only": GRPO,
    "random_skip": GRPO,
    "grpo_strict": (*GRPO, *_reward("strict")),
    # The paper's settings, and what it leaves open.
    "grpo_betas": (*GRPO, *_PAPER_BETAS),
    "gtpo_betas": (*GTPO, *_PAPER_BETAS),
    "span_all": _gtpo(conflict_span="all"),
    "span_first": _gtpo(conflict_span="first"),
    "threshold_0.2": _gtpo(completion_filter="always", entropy_threshold=0.2),
    "grpo_G12": (*GRPO, "actor_rollout_ref.rollout.n=12"),
    "gtpo_G12": (*GTPO, "actor_rollout_ref.rollout.n=12"),
    # Of the runs in `studies.confirm` only.
    "gamma_0.01": _gtpo(entropy_coeff=0.01),
    "gamma_1": _gtpo(entropy_coeff=1),
    "grpo_coin": (*GRPO, *_reward("coin")),
}
"""What a method changes in recipes/config/gtpo_cpu.yaml, as one gives it to verl."""
CONTROLS = {"positive_only": "drop_negative", "random_skip": "skip_at_random"}
"""Methods that verl does not have: which function of `studies.fast` changes GRPO's advantages."""


@dataclass(frozen=True)
class Start:
    """A task and the model that all methods start from.

    Args:
        task: one of `gtpo_verl.cpu.tiny.TASKS`.
        warm_steps: supervised steps of the warm start.
        temperature: of sampling, and of the probabilities that are trained.
    """

    task: str
    warm_steps: int = 250
    temperature: float = 1.0

    @property
    def name(self) -> str:
        """Of its folder in results/."""
        usual = (self.warm_steps, self.temperature) == (250, 1.0)
        return self.task if usual else f"{self.task}-{self.warm_steps}-T{self.temperature:g}"


@dataclass(frozen=True)
class Cell:
    """What a row of a table reports: the runs of all seeds with one start, method and learning rate."""

    start: Start
    method: str
    lr: float

    def log(self, seed: int) -> Path:
        """Where a run's log lies once it is complete."""
        return HERE / "results" / self.start.name / f"{self.method}-lr{self.lr:g}-seed{seed}.json.gz"


ADDITION, SPELLING, COUNTING = Start("arithmetic"), Start("spell_backward"), Start("letter_counting")
WORDED = Start("worded_counting")
# Where the mean entropy lies just below ln 2 and up to a quarter of the completions above it.
HOT_COUNTING, HOT_ADDITION = Start("letter_counting", 150, 1.2), Start("arithmetic", 125, 1.2)

RATES = (5e-5, 1e-4, 2e-4, 4e-4)
MIDDLE = 1e-4


def cells(starts: Sequence[Start], methods: Sequence[str], rates: Sequence[float] = (MIDDLE,)) -> list[Cell]:
    """Every combination."""
    return [Cell(*combination) for combination in product(starts, methods, rates)]


USUAL = (COUNTING, SPELLING, ADDITION)
TABLES: dict[str, list[Cell]] = {
    "main": cells(USUAL, ("grpo", "grpo_token_mean", "gtpo"), RATES) + cells(USUAL, ("grpo_kl",)),
    "parts": cells(USUAL[:2], ("grpo", "gamma", "entropy", "forward", "backward", "skip", "double", "masks", "gtpo")),
    "controls": cells(USUAL[:2], ("grpo", "positive_only", "random_skip", "skip", "grpo_strict", "gtpo")),
    "long": cells((WORDED,), ("grpo", "grpo_token_mean", "gtpo")),
    "collapse": cells((HOT_COUNTING, HOT_ADDITION), ("grpo", "filter", "only_negative", "gtpo_no_filter", "gtpo")),
    "paper": cells(
        (COUNTING,),
        ("grpo", "gtpo", "grpo_G12", "gtpo_G12", "grpo_betas", "gtpo_betas", "span_all", "threshold_0.2"),
    ),
}
"""The tables of docs/study.md. A cell may stand in several; its runs are made once."""


def plan() -> list[tuple[Cell, int]]:
    """Every (cell, seed): seed by seed, and within a seed the tables in their order, so that all prefixes compare."""
    unique = list(dict.fromkeys(cell for table in TABLES.values() for cell in table))
    return [(cell, seed) for seed in range(1, SEEDS + 1) for cell in unique]
