"""Block 15: other rules for λ against GRPO and GTPO at equal settings, by the rule of studies/DESIGN.md."""

from collections.abc import Mapping

from studies.comparisons import compare
from studies.plan import RULES_ARMS, planned
from studies.runs import results
from studies.statistics import Comparison, holm, interval, short
from studies.titles import METHODS, METRICS

MATTERS = 0.02
"""A difference in accuracy within which two methods do not differ."""
SIGNIFICANT = 0.05
AGAINST = ("grpo", "gtpo")
JUDGED = RULES_ARMS[2:]
"""The methods that are compared with both of `AGAINST`."""
MEASURES = ("accuracy", "exact_format", "well_formed", "eos", "pass8")


def progress() -> str:
    """Say how many runs there are, or nothing once all are made."""
    needed = len(planned("15"))
    made = len(results(planned("15")))
    return "" if made == needed else f"not judged yet ({made} of {needed} runs)"


def verdict(comparison: Comparison, p: float) -> str:
    """Judge the differences in accuracy of the pairs, with their corrected p."""
    if p < SIGNIFICANT:
        return "more accurate" if comparison.mean > 0 else "less accurate"
    low, high = interval(comparison.differences)
    return "no difference that matters" if -MATTERS < low and high < MATTERS else "undecided"


def verdicts(comparisons: Mapping[tuple[str, str], Comparison]) -> dict[tuple[str, str], str]:
    """Judge each comparison, and write its corrected p, with Holm's correction over all of them."""
    names = {f"{first} - {second}": (first, second) for first, second in comparisons}
    corrected = holm({name: comparisons[pair].p for name, pair in names.items()})
    return {
        pair: f"*{verdict(comparisons[pair], corrected[name])}* (p {short(corrected[name])})"
        for name, pair in names.items()
    }


def table() -> tuple[list[str], list[list[str]]]:
    """Make a row per method: runs that lost the exact format, its measures, what the rule says; none before that."""
    measures = [METRICS[metric] for metric in MEASURES]
    differences = [f"accuracy minus {METHODS[other]}'s" for other in AGAINST]
    header = ["", "lost the exact format", *measures, *differences]
    if progress():
        return header, []
    runs = results(planned("15"))
    comparisons = {}
    for method in JUDGED:
        for other in AGAINST:
            comparisons[method, other] = compare(runs, method, other, "accuracy")
    judged = verdicts(comparisons)
    rows = []
    for method in RULES_ARMS:
        here = runs[runs["method"] == method]
        row = [METHODS[method], f"{here['lost'].sum()} of {len(here)}"]
        row += [f"{here[metric].mean():.2f}" for metric in MEASURES]
        for other in AGAINST:
            if method == other:
                row.append("")
            elif (method, other) in judged:
                row.append(f"{comparisons[method, other]}: {judged[method, other]}")
            else:
                row.append(str(compare(runs, method, other, "accuracy")))
        rows.append(row)
    return header, rows
