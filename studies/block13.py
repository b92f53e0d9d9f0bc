"""Blocks 13 and 14: GTPO against the controls that users have, by the rules of studies/DESIGN.md."""

from collections.abc import Mapping, Sequence

from pandas import DataFrame

from studies.comparisons import whole_seeds
from studies.plan import ANSWER_ARMS, SPLIT_SEEDS, USED_ARMS, complete, planned, read_log
from studies.runs import form, results
from studies.statistics import Comparison, described, holm, interval, short, sign_flips
from studies.titles import METHODS, METRICS, rate

MATTERS = 0.10
"""A difference in the exact format."""
NO_DIFFERENCE = 0.08
"""Limit of the interval of a difference in accuracy that is none, in block 14."""
SIGNIFICANT = 0.05
CONTROLS = {"C − A": "A", "C − B": "B"}
"""The comparisons of block 13: GTPO with the clamp, C, minus each control."""
MEASURED = ("exact_format", "well_formed", "eos", "accuracy")
HALFWAY = 30
"""The step after which held-out questions are asked too."""


def differences(runs: DataFrame, first: tuple[str, float], second: tuple[str, float], metric: str) -> list[float]:
    """Return first arm minus second on each seed on which both have run; an arm is its method and learning rate."""
    values = runs.set_index(["method", "lr", "seed"])[metric].sort_index()
    return (values[first] - values[second]).dropna().tolist()


def verdict(of_pairs: Sequence[float], p: float) -> str:
    """Judge the paired differences in the exact format, with their corrected p."""
    mean = sum(of_pairs) / len(of_pairs)
    if p < SIGNIFICANT and mean > MATTERS:
        return "keeps"
    if p < SIGNIFICANT and mean < -MATTERS:
        return "loses"
    low, high = interval(of_pairs)
    return "nothing that matters" if -MATTERS < low and high < MATTERS else "undecided"


def verdicts(of_comparison: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Judge each comparison, with Holm's correction over all of them."""
    corrected = holm({name: sign_flips(of_pairs) for name, of_pairs in of_comparison.items()})
    return {name: verdict(of_pairs, corrected[name]) for name, of_pairs in of_comparison.items()}


def made(block: str, without: int | None = None) -> tuple[DataFrame, int]:
    """Return the runs of the seeds of block 13 that are whole, and how many seeds there are to be.

    Args:
        block: `13-cpu` or `13`.
        without: a seed to leave out.
    """
    runs = [(cell, seed) for cell, seed in planned(block) if seed != without]
    return whole_seeds(results(runs), len(USED_ARMS)), len({seed for _, seed in runs})


def is_whole(block: str) -> bool:
    """Return whether all seeds of block 13 are whole, so that it is judged."""
    runs, needed = made(block)
    return runs["seed"].nunique() == needed


def answers(block: str, without: int | None = None) -> dict[str, str]:
    """Say what the rule does of each comparison of block 13, or how many seeds there are yet."""
    runs, needed = made(block, without)
    whole = runs["seed"].nunique()
    if whole < needed:
        return dict.fromkeys(CONTROLS, f"not judged yet ({whole} of {needed} seeds)")
    exact_format = {
        name: differences(runs, USED_ARMS["C"], USED_ARMS[control], "exact_format")
        for name, control in CONTROLS.items()
    }
    by_rule = verdicts(exact_format)
    corrected = holm({name: sign_flips(of_pairs) for name, of_pairs in exact_format.items()})
    found = {}
    for name, control in CONTROLS.items():
        well_formed = Comparison(differences(runs, USED_ARMS["C"], USED_ARMS[control], "well_formed"))
        difference = f"{Comparison(exact_format[name])} (p {short(corrected[name])}, corrected)"
        found[name] = f"*{by_rule[name]}*, {difference} in the exact format"
        if well_formed.differences:
            found[name] += f", {well_formed} up to the first `</answer>`"
            if by_rule[name] in ("keeps", "loses") and abs(well_formed.mean) <= MATTERS:
                found[name] += ": a stop string repairs most of it"
    return found


def without_split_seeds(block: str) -> str:
    """Say what the rule would without each seed whose arms were made on several machines; nothing if there is none."""
    sentences = []
    for seed in SPLIT_SEEDS if is_whole(block) else ():
        of_comparison = answers(block, without=seed)
        said = "; ".join(f"{name}: {answer}" for name, answer in of_comparison.items())
        sentences.append(f"Without seed {seed}, whose runs were made on several machines: {said}.")
    return " ".join(sentences)


def table(block: str) -> tuple[list[str], list[list[str]]]:
    """Make a row per measure and arm of block 13, of the whole seeds; the differences once all seeds are whole."""
    runs, _ = made(block)
    seeds = sorted(runs["seed"].unique())
    judged = is_whole(block)
    halfway = _halfway(block)
    rows = []
    for metric in MEASURED:
        for name, (method, lr) in USED_ARMS.items():
            here = runs[(runs["method"] == method) & (runs["lr"] == lr)].set_index("seed")
            row = [METRICS[metric], f"{name}: {METHODS[method]}, {rate(lr)}"]
            row += [f"{here[metric].loc[seed]:.2f}" for seed in seeds]
            row.append(_mean_halfway(halfway, method, lr, seeds, metric))
            if judged:
                of_pairs = differences(runs, USED_ARMS["C"], (method, lr), metric)
                row.append("" if name == "C" else str(Comparison(of_pairs)))
            rows.append(row)
    header = ["", "", *(f"seed {seed}" for seed in seeds), f"mean at step {HALFWAY}"]
    return header + (["C minus it"] if judged else []), rows if seeds else []


def _halfway(block: str) -> dict[tuple[str, float, int], dict[str, float]]:
    """Return the measures at step 30 of each complete run, by its method, learning rate and seed."""
    found = {}
    for cell, seed in complete(planned(block)):
        held_out = read_log(cell.log(seed)).get(f"held_out_{HALFWAY}")
        if held_out:
            measures = form(held_out, held_out["samples"])
            measures["accuracy"] = sum(held_out["right"]) / (held_out["samples"] * len(held_out["right"]))
            found[cell.method, cell.lr, seed] = measures
    return found


def _mean_halfway(
    halfway: Mapping[tuple[str, float, int], Mapping[str, float]],
    method: str,
    lr: float,
    seeds: Sequence[int],
    metric: str,
) -> str:
    values = [halfway[method, lr, seed][metric] for seed in seeds if (method, lr, seed) in halfway]
    return f"{sum(values) / len(values):.2f}" if values else "–"


def answer_alone() -> str:
    """Say what block 14's rule does, with its numbers, or how many seeds there are yet."""
    runs = whole_seeds(results(planned("14")), len(ANSWER_ARMS))
    needed = len({seed for _, seed in planned("14")})
    whole = runs["seed"].nunique()
    if whole < needed:
        return f"not judged yet ({whole} of {needed} seeds)"
    grpo, gtpo = ((method, 1e-5) for method in ANSWER_ARMS)
    of_pairs = differences(runs, gtpo, grpo, "accuracy")
    return f"*{answer_alone_verdict(of_pairs)}*, {described(Comparison(of_pairs))}"


def answer_alone_verdict(of_pairs: Sequence[float]) -> str:
    """Judge block 14's paired differences in accuracy, GTPO minus GRPO."""
    low, high = interval(of_pairs)
    if sign_flips(of_pairs) < SIGNIFICANT:
        return "GTPO is more accurate" if sum(of_pairs) > 0 else "GTPO is less accurate"
    return "no difference" if -NO_DIFFERENCE < low and high < NO_DIFFERENCE else "undecided"
