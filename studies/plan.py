"""What the study runs, as data: studies/DESIGN.md says why. A run's name is its log's, results/NAME.json.gz.

The logs of finished blocks lie under these names in archives, results/*.zip.
"""

import functools
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from studies.questions import FURTHER_CHARACTERS, max_response_length

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

SEEDS = 3
"""Of every cell of part one, whose runs are made: today's loop logs other curves."""

GTPO = ("algorithm.adv_estimator=gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gtpo")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
_NO_ENTROPY = ("algorithm.gtpo.entropy_coeff=0", "algorithm.gtpo.completion_filter=never")
_PAPER_BETAS = (
    "actor_rollout_ref.actor.optim.betas=[0.999999,0.999999]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)
_NO_STD = ("algorithm.norm_adv_by_std_in_grpo=false",)
_FOUR_UPDATES = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)


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
    "confident_skip": GRPO,
    "grpo_strict": (*GRPO, *_reward("strict")),
    "gtpo_strict": (*GTPO, *_reward("strict")),
    # What others do, and what users have.
    "dr_grpo": (*GRPO, *_NO_STD, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"),  # arXiv:2503.20783
    "gtpo_no_std": (*GTPO, *_NO_STD),  # as the authors' code has it
    "grpo_4_updates": (*GRPO, *_FOUR_UPDATES),
    "gtpo_4_updates": (*GTPO, *_FOUR_UPDATES, "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"),
    # The paper's settings, and what it leaves open.
    "grpo_betas": (*GRPO, *_PAPER_BETAS),
    "gtpo_betas": (*GTPO, *_PAPER_BETAS),
    "span_all": _gtpo(conflict_span="all"),
    "span_first": _gtpo(conflict_span="first"),
    "threshold_0.2": _gtpo(completion_filter="always", entropy_threshold=0.2),
    "grpo_G12": (*GRPO, "actor_rollout_ref.rollout.n=12"),
    "gtpo_G12": (*GTPO, "actor_rollout_ref.rollout.n=12"),
    # Other masks and other outcomes (`studies.variants`), without γ and filter.
    "common": GRPO,
    "agreed": GRPO,
    "common_skip": GRPO,
    "gated": GRPO,
    "gated_masks": (*GTPO, *_NO_ENTROPY),
    "corpo_masks": (*GTPO, *_NO_ENTROPY),
    "divided_masks": (*GTPO, *_NO_ENTROPY),
    "corpo_gtpo": GTPO,  # with γ and filter
    "gated_gtpo": GTPO,
    # Block 10: the clamp by the package's key, and other rewards.
    "grpo_clamped": (*_gtpo(conflict_span="none", min_correct_reward=11), *_NO_ENTROPY),
    "gtpo_clamped": _gtpo(min_correct_reward=11),
    "gtpo_answer": (*GTPO, *_reward("answer")),
    "grpo_answer": (*GRPO, *_reward("answer")),
    "gtpo_authors": (*GTPO, *_reward("authors")),
    # Block 15: other rules for λ in place of the conflict masks.
    "prefix_weights": (*_gtpo(token_weights="pkg://examples.token_weights.lambda_grpo"), *_NO_ENTROPY),
    "highest_entropy": (*_gtpo(token_weights="pkg://examples.token_weights.highest_entropy"), *_NO_ENTROPY),
    "shared_beginning": (*_gtpo(token_weights="pkg://examples.token_weights.shared_beginning"), *_NO_ENTROPY),
    # Of the runs in `studies.verl_runs` only.
    "gamma_0.01": _gtpo(entropy_coeff=0.01),
    "gamma_1": _gtpo(entropy_coeff=1),
    "grpo_coin": (*GRPO, *_reward("coin")),
}
"""What a method changes in recipes/config/gtpo_cpu.yaml, as one gives it to verl."""
CONTROLS = {
    "positive_only": "drop_negative",
    "random_skip": "skip_at_random",
    "confident_skip": "skip_confident",
    "common": "common",
    "agreed": "agreed",
    "common_skip": "common_skip",
    "gated": "gate",
    "gated_masks": "gate",
    "corpo_masks": "never_positive_if_wrong",
    "divided_masks": "divide",
    "corpo_gtpo": "never_positive_if_wrong",
    "gated_gtpo": "gate",
}
"""Methods that verl does not have: which function of `studies.fast` changes their advantages."""


@dataclass(frozen=True)
class Start:
    """A task, the model that all methods start from, and how long they train.

    Args:
        task: one of `studies.questions.TASKS`, or `leg_counting`, which has a real language model.
        warm_steps: supervised steps of the warm start.
        temperature: of sampling, and of the probabilities that are trained.
        prompts: of a step.
        steps: of training.
        animals: kinds of animals in a question of `leg_counting`.
        evaluated: whether held-out questions are asked after the last step.
        kept_seeds: of the runs whose logs have the completions of the first steps.
        device: where the model is; the tiny one stays on the CPU.
        again: whether its runs repeat those of a start that is the same otherwise.
        held_out_at: steps after which held-out questions are asked too, which changes nothing in the run.
    """

    task: str
    warm_steps: int = 250
    temperature: float = 1.0
    prompts: int = 1
    steps: int = 400
    animals: int = 1
    evaluated: bool = True
    kept_seeds: tuple[int, ...] = ()
    device: str = "cpu"
    again: bool = False
    held_out_at: tuple[int, ...] = ()

    @property
    def is_real(self) -> bool:
        """Whether the model is SmolLM2-135M-Instruct."""
        return self.task == "leg_counting"

    @property
    def trains_alone(self) -> bool:
        """Whether its runs go one by one: the real model's on a CPU."""
        return self.is_real and self.device == "cpu"

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return 64 + 32 * self.animals if self.is_real else max_response_length(self.task)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that are multiplied, and to which a product is rounded."""
        return torch.bfloat16 if self.is_real else torch.float32

    @property
    def name(self) -> str:
        """Of its folder in results/."""
        usual = (self.warm_steps, self.temperature) == (250, 1.0) or self.is_real
        start = self.task if usual else f"{self.task}-{self.warm_steps}-T{self.temperature:g}"
        several = f"-{self.animals}" if self.animals > 1 else ""
        size = f"-{self.prompts}x{self.steps}" if self.prompts > 1 else ""
        where = f"-{self.device}" if self.device != "cpu" else ""
        return start + several + size + where + ("-again" if self.again else "")


@dataclass(frozen=True)
class Cell:
    """What the seeds of a run share.

    Args:
        start: task and model.
        method: one of `METHODS`.
        lr: learning rate.
    """

    start: Start
    method: str
    lr: float

    def log(self, seed: int) -> Path:
        """Where a run's log is once it is complete, until its block is archived."""
        return HERE / "results" / self.start.name / f"{self.method}-lr{self.lr:g}-seed{seed}.json.gz"


RATES = (5e-5, 1e-4, 2e-4, 4e-4)
MIDDLE = 1e-4


def cells(starts: Sequence[Start], methods: Sequence[str], rates: Sequence[float] = (MIDDLE,)) -> list[Cell]:
    """Return every combination."""
    return [Cell(*combination) for combination in product(starts, methods, rates)]


# ------------------------------------------------------------------ one prompt a step, complete: studies/DESIGN.md

ADDITION, SPELLING, COUNTING = Start("arithmetic"), Start("spell_backward"), Start("letter_counting")
WORDED = Start("worded_counting")
# Where the mean entropy lies just below ln 2 and up to a quarter of the completions above it.
HOT_COUNTING, HOT_ADDITION = Start("letter_counting", 150, 1.2), Start("arithmetic", 125, 1.2)

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
"""Tables of studies/ONE_PROMPT.md. A cell may stand in several; its runs are made once."""


def one_prompt() -> list[tuple[Cell, int]]:
    """Every (cell, seed): seed by seed, and within a seed the tables in their order, so that all prefixes compare."""
    unique = list(dict.fromkeys(cell for table in TABLES.values() for cell in table))
    return [(cell, seed) for seed in range(1, SEEDS + 1) for cell in unique]


# ------------------------------------------------------------------ many prompts a step, and a real model

LEGS, LONG_LEGS = Start("leg_counting", 5, 1.0, 4, 60), Start("leg_counting", 7, 1.0, 4, 60, animals=2)
ON_GPU, AGAIN = replace(LEGS, device="cuda"), replace(LEGS, again=True)
HALFWAY, HALFWAY_ON_GPU = replace(LEGS, held_out_at=(30,)), replace(ON_GPU, held_out_at=(30,))
MANY = tuple(Start(task, prompts=8, steps=100) for task in ("letter_counting", "spell_backward", "arithmetic"))
WORDY = tuple(Start(task, prompts=8, steps=100) for task in FURTHER_CHARACTERS)
SUBTRACTION = Start("subtraction", prompts=8, steps=100)
GUESSED = Start("addition_or_guess", prompts=8, steps=100)
REAL_RATES = (5e-6, 1e-5, 2e-5)
MANY_RATES = (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4)
REAL_METHODS = {  # and whose best rate each takes
    "grpo": "grpo",
    "gtpo": "gtpo",
    "grpo_token_mean": "grpo",
    "positive_only": "grpo",
    "grpo_strict": "grpo",
    "gtpo_strict": "gtpo",
}
MANY_METHODS = ("grpo", "grpo_token_mean", "gtpo", "positive_only")
RIVALS = ("masks", "confident_skip", "dr_grpo", "gtpo_no_std", "grpo_kl", "grpo_4_updates", "gtpo_4_updates")
CONFIRMED = ("grpo", "positive_only", "gtpo", "masks", "gtpo_4_updates")
PARTS, SHRUNK = ("gtpo", "skip", "double", "masks", "grpo"), (3, 6)
SCREEN = replace(LEGS, steps=30, evaluated=False, kept_seeds=SHRUNK)
SCREENED = (
    *("grpo", "masks", "common", "agreed", "backward", "common_skip"),
    *("gated", "gated_masks", "corpo_masks", "divided_masks"),
)
SCREEN_SEEDS = (3, 6, 1, 2, 4, 5)
"""Those on which GTPO's completions shrank come first."""
CLAMPED = "corpo_gtpo"
"""GTPO with the clamp: no A > 0 for a wrong answer."""
CANDIDATES = (CLAMPED, "gated_gtpo")
"""Of block 7, the best first."""
CONTROL_SEEDS = range(7, 13)
"""Of blocks 9 and 10."""
CONTROL_ARMS = {
    "grpo_clamped": 1e-5,
    "masks": 1e-5,
    "gtpo_answer": 1e-5,
    "grpo_answer": 1e-5,
    "gtpo_authors": 1e-5,
    "gtpo_clamped": 5e-6,
}
"""Of block 10, in their order, and their learning rates."""
BOTH_CLAMPED, BESIDE_CLAMPED = ("grpo_clamped", CLAMPED), ("grpo", "gtpo", "corpo_masks")
FORMAT_SEEDS, FORMAT_SEEDS_ON_CPUS = range(13, 25), range(15, 23)
"""Of block 12: what its question compares, what stands beside it, and the seeds, those on CPUs last."""
USED_ARMS = {"C": (CLAMPED, 1e-5), "A": ("grpo", 1e-5), "B": ("grpo", 5e-6)}
"""Of block 13: GTPO with the clamp, GRPO as people run it, and GRPO at half that learning rate."""
USED_SEEDS_ON_CPUS, USED_SEEDS = range(25, 33), range(33, 45)
SPLIT_SEEDS: tuple[int, ...] = ()
"""Seeds of block 13 on CPUs whose arms were made on several machines: the verdict is given without each of them too."""
ANSWER_ARMS, ANSWER_SEEDS = ("grpo_answer", "gtpo_answer"), range(45, 75)
"""Of block 14, whose reward is for the answer alone."""
RULES_ARMS = ("grpo", "gtpo", "masks", "prefix_weights", "highest_entropy", "shared_beginning")
RULES_SEEDS, RULES_RATES = range(21, 26), MANY_RATES[1:3]
"""Of block 15: GRPO, GTPO, its masks alone, and three other rules for λ."""
GUESSING_ARMS, GUESSING_SEEDS = ("grpo", "gtpo", "grpo_clamped", "gtpo_clamped", "masks"), range(41, 53)
"""Of block 11."""
BESIDE = ("grpo", "gtpo", CLAMPED, "corpo_masks")
"""The arms of block 9, whose runs are the pairs of block 10's."""
ON_GPU_ARMS = dict.fromkeys(("grpo_clamped", CLAMPED, "grpo", "masks", "gtpo"), 1e-5) | CONTROL_ARMS
"""What Q1 of block 10 compares, then Q2, then the other arms; and their learning rates."""
ENDED_EARLY = ("7", "9")
"""Blocks that get no further runs: studies/DESIGN.md says why."""
LEAST_EXACT_FORMAT = 0.9
"""Least share of completions in the exact format at a rate that one would keep."""


def best_rate(
    start: Start, method: str, rates: Sequence[float], seeds: Sequence[int], least_exact_format: float = 0.0
) -> float | None:
    """The rate that `preference` puts first, by means over the seeds; None while a run is missing."""
    logs = {rate: [Cell(start, method, rate).log(seed) for seed in seeds] for rate in rates}
    if not all(is_stored(log) for of_rate in logs.values() for log in of_rate):
        return None

    def rank(rate: float) -> tuple[bool, float, float]:
        right = sum(held_out_share(log, "right") for log in logs[rate]) / len(seeds)
        exact_format = sum(held_out_share(log, "strict") for log in logs[rate]) / len(seeds)
        return preference(rate, right, exact_format, least_exact_format)

    return max(rates, key=rank)


def preference(
    rate: float, accuracy: float, exact_format: float, least_exact_format: float
) -> tuple[bool, float, float]:
    """Return what the rate to choose has the largest of.

    Of the rates whose exact format reaches `least_exact_format`, or of all if none does, it is the most accurate, and
    of several the lowest.
    """
    return exact_format >= least_exact_format - 1e-9, accuracy, -rate


def complete(runs: Iterable[tuple[Cell, int]]) -> list[tuple[Cell, int]]:
    """Return those that have a log."""
    return [(cell, seed) for cell, seed in runs if is_stored(cell.log(seed))]


@functools.cache
def _archives(folder: Path) -> dict[str, ZipFile]:
    """Return the archive of each archived log, by its name in results/."""
    archives = [ZipFile(path) for path in sorted(folder.glob("*.zip"))]
    return {name: archive for archive in archives for name in archive.namelist()}


def _name(log: Path) -> str:
    return log.relative_to(HERE / "results").as_posix()


def is_stored(log: Path) -> bool:
    """Return whether there is a log, as a file of its own or in an archive."""
    return log.exists() or _name(log) in _archives(HERE / "results")


def read_text(log: Path) -> str:
    """The text of a stored log."""
    packed = log.read_bytes() if log.exists() else _archives(HERE / "results")[_name(log)].read(_name(log))
    return gzip.decompress(packed).decode()


@functools.cache  # a log never changes, and every look at the blocks reads those that rates are chosen by
def read_log(log: Path) -> dict[str, Any]:
    """What a run of the fast loop has left."""
    return json.loads(read_text(log))


def archive(logs: Iterable[Path], name: str) -> None:
    """Move logs into results/NAME.zip, which grows if it is there."""
    with ZipFile(HERE / "results" / f"{name}.zip", "a") as target:
        for log in logs:
            target.write(log, _name(log))
    for log in logs:
        log.unlink()
    _archives.cache_clear()


def held_out_share(log: Path, of: str) -> float:
    """Share of completions that are `right`, or `strict`, on held-out questions after the last step."""
    held_out = read_log(log)["held_out"]
    return sum(held_out[of]) / (held_out["samples"] * len(held_out[of]))


def extended(start: Start, methods: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> list[float]:
    """The grid, extended by a factor of 2 where the best rate of a method lies at its edge; at most twice to a side."""
    grid = sorted(rates)
    for _ in range(2):
        best = [best_rate(start, method, grid, seeds) for method in methods]
        low, high = grid[0], grid[-1]
        grid = [*([low / 2] if low in best else []), *grid, *([2 * high] if high in best else [])]
    return grid


def blocks() -> dict[str, list[tuple[Cell, int]]]:
    """The runs of each block in their order. What follows from a choice of rates appears once that is made."""
    first, all_seeds = (1,), range(1, 6)
    real_rates = {method: extended(LEGS, [method], REAL_RATES, first) for method in ("grpo", "gtpo")}
    chosen = {method: best_rate(LEGS, method, grid, first) for method, grid in real_rates.items()}
    known = {method: rate for method, rate in chosen.items() if rate and None not in chosen.values()}
    of_counting = {method: best_rate(MANY[0], method, MANY_RATES, all_seeds) for method in ("grpo", "gtpo")}
    real = [Cell(LEGS, method, known[like]) for method, like in REAL_METHODS.items() if like in known]
    many = [
        cell
        for start in MANY
        for cell in cells([start], MANY_METHODS, extended(start, MANY_METHODS, MANY_RATES, all_seeds))
    ]
    shares = [Cell(start, method, rate) for start in (MANY[0], *WORDY) for method, rate in of_counting.items() if rate]
    chosen_before = [
        Cell(start, method, rate)
        for start, method in product(MANY[:2], CONFIRMED)
        if (rate := best_rate(start, method, MANY_RATES[2:], range(1, 4), LEAST_EXACT_FORMAT))
    ]
    fresh = [*chosen_before, *cells([SUBTRACTION], CONFIRMED, MANY_RATES[2:])]
    return {
        "1a. learning rates of the real model": [
            (Cell(LEGS, method, rate), 1) for method, grid in real_rates.items() for rate in grid
        ],
        "1b. the real model": [(cell, seed) for seed in range(2, 7) for cell in real],
        "1c. its longer answers": [
            (Cell(LONG_LEGS, method, rate), seed) for seed in range(2, 5) for method, rate in known.items()
        ],
        "2. many prompts": [(cell, seed) for seed in all_seeds for cell in many],
        "3. rivals": [(cell, seed) for seed in range(1, 4) for cell in cells(MANY[:2], RIVALS, MANY_RATES[2:])],
        "4. share of conflict tokens": [(cell, seed) for seed in all_seeds for cell in shares],
        "5. fresh seeds and another task": [(cell, seed) for seed in range(6, 11) for cell in fresh],
        "6. GTPO's parts on the real model": [
            (Cell(LEGS, method, known["gtpo"]), seed) for seed in SHRUNK for method in PARTS if known
        ],
        "7. other masks, screened": [
            (cell, seed) for seed in SCREEN_SEEDS for cell in cells([SCREEN], SCREENED, [REAL_RATES[1]])
        ],
        "8. two candidates on many prompts": [
            (cell, seed)
            for seed in range(11, 21)
            for cell in cells(MANY, ("grpo", "gtpo", *CANDIDATES), MANY_RATES[1:3])
        ],
        "9. the first on the real model": [
            (cell, seed) for seed in range(7, 15) for cell in cells([LEGS], BESIDE, [REAL_RATES[1]])
        ],
        "9-again. two runs of block 9, made as block 10": [
            (cell, 8) for cell in cells([AGAIN], (CLAMPED, "gtpo"), [REAL_RATES[1]])
        ],
        "10. the clamp, γ and the reward": [
            (Cell(LEGS, method, rate), seed) for method, rate in CONTROL_ARMS.items() for seed in CONTROL_SEEDS
        ],
        "10-gpu. the same on a GPU": [
            (Cell(ON_GPU, method, rate), seed) for method, rate in ON_GPU_ARMS.items() for seed in CONTROL_SEEDS
        ],
        "11. the clamp where a tiny model can guess": [
            (cell, seed) for seed in GUESSING_SEEDS for cell in cells([GUESSED], GUESSING_ARMS, MANY_RATES[2::2])
        ],
        "12. the exact format, on fresh seeds on a GPU": [
            (cell, seed) for seed in FORMAT_SEEDS for cell in cells([ON_GPU], BOTH_CLAMPED, [REAL_RATES[1]])
        ],
        "12-cpu. the same on CPUs": [
            (cell, seed) for seed in FORMAT_SEEDS_ON_CPUS for cell in cells([LEGS], BOTH_CLAMPED, [REAL_RATES[1]])
        ],
        "12-beside. the same without the clamp, and without γ": [
            (cell, seed) for seed in FORMAT_SEEDS for cell in cells([ON_GPU], BESIDE_CLAMPED, [REAL_RATES[1]])
        ],
        "13-cpu. the control that users have": [
            (Cell(HALFWAY, method, rate), seed) for seed in USED_SEEDS_ON_CPUS for method, rate in USED_ARMS.values()
        ],
        "13. the same on a GPU": [
            (Cell(HALFWAY_ON_GPU, method, rate), seed) for seed in USED_SEEDS for method, rate in USED_ARMS.values()
        ],
        "14. a reward for the answer alone, on a GPU": [
            (cell, seed) for seed in ANSWER_SEEDS for cell in cells([HALFWAY_ON_GPU], ANSWER_ARMS, [REAL_RATES[1]])
        ],
        "15. other rules for λ": [
            (cell, seed) for seed in RULES_SEEDS for cell in cells(MANY, RULES_ARMS, RULES_RATES)
        ],
    }


def number(block: str) -> str:
    """Return a block's number, such as `1b`."""
    return block.split(".")[0]


def planned(block: str = "") -> list[tuple[Cell, int]]:
    """The runs of part two, or those of a block by its number, as `1b`, in their order, each once."""
    return list(dict.fromkeys(run for name, runs in blocks().items() if block in ("", number(name)) for run in runs))
