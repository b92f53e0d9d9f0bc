"""What the study runs: every run by name, in the order in which they are run.

A run's name is GROUP/TASK-METHOD[-lrRATE]-seedN; its log is results/NAME.jsonl.gz. All runs share
recipes/config/gtpo_cpu.yaml with one prompt × 8 completions a step; a method is the settings below and nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

GTPO = ("algorithm.adv_estimator=gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gtpo")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
_NO_ENTROPY = ("algorithm.gtpo.entropy_coeff=0", "algorithm.gtpo.completion_filter=never")


def _reward(name: str) -> tuple[str, ...]:
    return (f"reward.custom_reward_function.name={name}",)


def _gtpo(**keys: object) -> tuple[str, ...]:
    return (*GTPO, *(f"++algorithm.gtpo.{key}={value}" for key, value in keys.items()))


METHODS: dict[str, tuple[str, ...]] = {
    "grpo": GRPO,
    "gtpo": GTPO,
    # The parts of GTPO.
    "masks": (*GTPO, *_NO_ENTROPY),
    "backward": (*_gtpo(conflict_masks="backward"), *_NO_ENTROPY),
    "forward": (*_gtpo(conflict_masks="forward"), *_NO_ENTROPY),
    "skip": (*_gtpo(conflict_weight_positive=1), *_NO_ENTROPY),  # λ = 0, 1
    "double": (*_gtpo(conflict_weight_negative=1), *_NO_ENTROPY),  # λ = 1, 2
    "entropy": _gtpo(conflict_span="none"),  # the filter and γ alone
    # Controls.
    "grpo_strict": (*GRPO, *_reward("strict")),
    "grpo_coin": (*GRPO, *_reward("coin")),
    # What the paper leaves open.
    "span_first": _gtpo(conflict_span="first"),
    "span_all": _gtpo(conflict_span="all"),
    "threshold_0.2": _gtpo(completion_filter="always", entropy_threshold=0.2),
    "gamma_0.01": _gtpo(entropy_coeff=0.01),
    "gamma_1": _gtpo(entropy_coeff=1),
    "grpo_G12": (*GRPO, "actor_rollout_ref.rollout.n=12"),
    "gtpo_G12": (*GTPO, "actor_rollout_ref.rollout.n=12"),
}
PARTS = ("masks", "backward", "forward", "skip", "double", "entropy")
CONTROLS = ("grpo_strict", "grpo_coin")
OPEN = ("span_first", "span_all", "threshold_0.2", "gamma_0.01", "gamma_1", "grpo_G12", "gtpo_G12")

# The learning rate is chosen on `subtraction`, which is not reported; then one rate per family serves all tasks.
SELECTION_RATES = (5e-5, 1e-4, 2e-4)
PAPER_BETAS = (
    "actor_rollout_ref.actor.optim.betas=[0.999999,0.999999]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)


@dataclass(frozen=True)
class Run:
    """One run of verl's trainer.

    Args:
        group: the question that it answers.
        task: one of `gtpo_verl.cpu.tiny.TASKS`.
        method: one of `METHODS`.
        seed: of the data, the warm start and the run.
        steps: training steps.
        lr: learning rate; None: the one that was chosen for the method's family.
        warm_start: settings of the warm start that differ from its defaults.
        settings: more overrides of verl's config.
    """

    group: str
    task: str
    method: str
    seed: int
    steps: int = 600
    lr: float | None = None
    warm_start: dict[str, Any] = field(default_factory=dict, hash=False)
    settings: Sequence[str] = ()

    @property
    def family(self) -> str:
        """Whose learning rate it takes."""
        return "grpo" if self.method.startswith("grpo") else "gtpo"

    @property
    def name(self) -> str:
        """Unique in the plan."""
        rate = "" if self.lr is None else f"-lr{self.lr:g}"
        return f"{self.group}/{self.task}-{self.method}{rate}-seed{self.seed}"

    @property
    def log(self) -> Path:
        """Where its metrics lie once it is complete."""
        return HERE / "results" / f"{self.name}.jsonl.gz"


def _seeds(group: str, task: str, methods: Sequence[str], seeds: Sequence[int], **settings) -> Iterator[Run]:
    """Seed by seed, so that an interrupted study has whole comparisons."""
    for seed in seeds:
        for method in methods:
            yield Run(group, task, method, seed, **settings)


def selection() -> Iterator[Run]:
    """The learning rates, on the task that is not reported."""
    for seed in (1, 2):
        for lr in SELECTION_RATES:
            for method in ("grpo", "gtpo"):
                yield Run("selection", "subtraction", method, seed, steps=200, lr=lr)


def quick() -> list[Run]:
    """GTPO and GRPO, one seed of the main comparison, run anew each time."""
    return list(_seeds("quick", "arithmetic", ("gtpo", "grpo"), (1,)))


def plan() -> list[Run]:
    """Every run, the most telling first."""
    first = "arithmetic"
    tasks = (first, "spell_backward", "letter_counting")
    noisy = {"warm_start": {"steps": 100}, "lr": 2e-4}
    runs = [
        *selection(),
        *_seeds("main", first, ("grpo", "gtpo"), range(1, 4)),
        # The two families got different rates; this is GRPO at GTPO's.
        *_seeds("rates", first, ("grpo",), range(1, 3), lr=1e-4),
        *_seeds("main", "spell_backward", ("grpo", "gtpo"), range(1, 2)),
        *_seeds("main", "letter_counting", ("grpo", "gtpo"), range(1, 4)),
        # Where GRPO loses its end, the parts of GTPO have something to do.
        *_seeds("parts", "letter_counting", ("backward", "forward", "grpo_strict", "entropy"), range(1, 2)),
        *(run for task in reversed(tasks) for run in _seeds("main", task, ("grpo", "gtpo"), range(1, 6))),
        *_seeds("parts", "letter_counting", (*PARTS, *CONTROLS), range(1, 6)),
        *_seeds("parts", first, (*PARTS, *CONTROLS), range(1, 6)),
        *_seeds("rates", first, ("grpo",), range(1, 4), lr=1e-4),
        *_seeds("rates", first, ("gtpo",), range(1, 4), lr=5e-5),
        *(run for lr in (3e-4, 1e-3) for run in _seeds("rates", first, ("grpo", "gtpo"), range(1, 4), lr=lr)),
        *_seeds("main", first, ("grpo", "gtpo"), range(6, 11)),
        *_seeds("betas", first, ("grpo", "gtpo", *PARTS, *CONTROLS), range(1, 6), settings=PAPER_BETAS),
        *_seeds("noisy", first, ("grpo", "gtpo"), range(1, 4), **noisy),
        *_seeds("open", first, OPEN, range(1, 4)),
    ]
    return list({run.name: run for run in runs}.values())
