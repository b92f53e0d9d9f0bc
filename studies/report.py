"""Tables, figures and the pages of the study, from the logs in results/: docs/study.md, its figures, and the lab book.

A page is its template with the {{names}} replaced by numbers of this module: no number is typed.
"""

import argparse
import csv
import functools
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gtpo_verl.algorithm.config import LN2
from recipes.paper.plots import save
from studies import block7, block10, block11, block12, figures, learning_rates, verl_runs
from studies.comparisons import (
    LAST,
    LOST,
    METRICS,
    SETTLED,
    TASKS,
    TITLES,
    Comparison,
    K,
    Run,
    compare,
    iqm,
    lost,
    prediction,
    rate,
    runs_of,
    stretches,
)
from studies.plan import (
    CLEAN,
    CONTROL_ARMS,
    GTPO,
    HERE,
    LEGS,
    MANY_RATES,
    METHODS,
    MIDDLE,
    ON_GPU_ARMS,
    RATES,
    ROOT,
    SCREEN,
    SHRUNK,
    TABLES,
    USUAL,
    Cell,
    Start,
    blocks,
    complete,
    is_stored,
    number,
    one_prompt,
    planned,
    read_log,
)

OUT = ROOT / "docs/results/study"
PAGES = {"page": ROOT / "docs/study.md", "one_prompt": HERE / "ONE_PROMPT.md"}
"""By the name of their templates."""
TABLES_PAGE, RUNS = HERE / "TABLES.md", HERE / "results/one-prompt.csv"
FURTHER = {
    "many": "Block 2, learning rates chosen by accuracy alone",
    "rivals": "Block 3, learning rates chosen by accuracy alone",
    "rivals, clean": "Block 3, learning rates chosen among those with clean endings of at least 0.9",
    "many, clean": "Block 2, learning rates chosen among those with clean endings of at least 0.9",
    "fresh": "Block 5, fresh seeds",
    "real by seed": "Block 1b by seed",
    "by share": "Blocks 2 and 4 by share of conflict tokens in GRPO's steps 1 to 20, GTPO minus GRPO",
    "candidates": "Block 8",
    "borne": "Block 2, learning rates with an accuracy within 0.05 of the method's best and clean endings of at least "
    "0.9",
    "real parts": "Block 6 by seed",
    "screened": "Block 7, seeds 3 and 6: push towards the short answer, and the last five steps",
    "real": "Block 1b, GTPO minus each method",
    "longer": "Block 1c, GTPO minus GRPO",
    "longer by seed": "Block 1c by seed",
    "longest by seed": "Block 4, after 440 characters, by seed",
    "better": "Every mean above GTPO's at chosen learning rates, the method minus GTPO",
}
"""Tables of TABLES.md beside those of cells, and their titles."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same of runs, of which there may be none."""
    return markdown(header, rows) if rows else "None of these runs is complete."


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, smallest and largest."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def cell_table(cells: Sequence[Cell], metrics: Sequence[str] = tuple(METRICS)) -> str:
    """A row per cell: mean, smallest and largest of its seeds."""
    rows = []
    for cell in cells:
        runs = runs_of([cell])
        digits = {name: 1 if name in ("length", "answers") else 2 for name in metrics}
        values = [spread([run.summary[name] for run in runs], digits[name]) for name in metrics]
        lost_end = f"{sum(map(lost, runs))} of {len(runs)}"
        rows.append([TASKS[cell.start], TITLES[cell.method], rate(cell.lr), lost_end, *values])
    return markdown(
        ["task", "method", "learning rate", "stopped terminating", *(METRICS[name] for name in metrics)], rows
    )


def method_table(cells: Sequence[Cell], metrics: Sequence[str]) -> str:
    """A row per method over all tasks: runs that stopped terminating, interquartile means, and paired differences."""
    runs = runs_of(cells)
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [run for run in runs if run.cell.method == method]
        if not own:
            continue
        row = [TITLES[method], f"{sum(map(lost, own))} of {len(own)}"]
        for metric in metrics:
            row.append(f"{iqm(np.array([run.summary[metric] for run in own])):.2f}")
            row.append("" if method == "grpo" else str(compare(runs, method, "grpo", metric)))
        rows.append(row)
    columns = [name for metric in metrics for name in (METRICS[metric], f"minus {TITLES['grpo']}")]
    return markdown(["", "stopped terminating", *columns], rows)


def grid_table(cells: Sequence[Cell], methods: Sequence[str], metrics: Sequence[str]) -> str:
    """A row per task and rate, and for each metric a column per method."""
    rows = []
    for start, lr in dict.fromkeys((cell.start, cell.lr) for cell in cells):
        row = [TASKS[start], rate(lr)]
        for metric in metrics:
            for method in methods:
                values = [run.summary[metric] for run in runs_of([Cell(start, method, lr)])]
                row.append(f"{np.mean(values):.2f}" if values else "–")
        rows.append(row)
    columns = [f"{METRICS[metric]}: {TITLES[method]}" for metric in metrics for method in methods]
    return markdown(["task", "learning rate", *columns], rows)


class Confirmed(NamedTuple):
    """A run under verl. Its `strict` does not ask for EOS, which is why the worst takes the lower of both."""

    cell: Cell
    seed: int
    summary: Mapping[str, float]


@functools.cache
def confirmations(steps: int) -> list[Confirmed]:
    """The runs under verl, as if they had ended after so many steps."""
    found = []
    for cell, seed in verl_runs.runs():
        logged = pd.DataFrame.from_dict(verl_runs.read_steps(cell, seed), orient="index")
        values = {name: column[:steps].to_numpy() for name, column in logged.items()}
        strict = np.minimum(values["reward/strict/mean"], values["completion/eos_rate"])
        summary = {
            "worst": float(stretches(strict[SETTLED:]).min()),
            "strict": float(strict[-LAST:].mean()),
            "accuracy": float(values["reward/acc/mean"][-LAST:].mean()),
            "pass8": float((values["reward/acc/mean"][-3 * LAST :] > 0).mean()),
            "entropy": float(values["actor/entropy"][-LAST:].mean()),
            "peak": float(stretches(values["actor/entropy"]).max()),
        }
        found.append(Confirmed(cell, seed, summary))
    return found


def agreement_table() -> str:
    """Cells that were run both under verl and in the fast loop, over the fast loop's number of steps."""
    rows = []
    steps = max(len(run.curves["acc"]) for run in runs_of(TABLES["main"]))
    for cell in dict.fromkeys(run.cell for run in confirmations(steps) if run.cell in TABLES["main"]):
        fast = runs_of([cell])
        under_verl = [run for run in confirmations(steps) if run.cell == cell]
        row = [TASKS[cell.start], TITLES[cell.method], rate(cell.lr), f"{len(under_verl)}, {len(fast)}"]
        for name in ("worst", "accuracy", "entropy"):
            ours = [
                run.summary[name] if name != "accuracy" else float(run.curves["acc"][-LAST:].mean()) for run in fast
            ]
            row += [spread([run.summary[name] for run in under_verl]), spread(ours)]
        rows.append(row)
    columns = [f"{METRICS[name]}: {where}" for name in ("worst", "accuracy", "entropy") for where in ("verl", "fast")]
    return markdown(["task", "method", "learning rate", "runs: verl, fast", *columns], rows)


def facts() -> dict[str, object]:
    """Every number and table that the templates of `PAGES` name."""
    found: dict[str, object] = {"ln2": f"{LN2:.3f}"}
    all_cells = list(dict.fromkeys(cell for cells in TABLES.values() for cell in cells))
    everything = runs_of(all_cells)
    found["runs"] = f"{len(everything)} of {len(one_prompt())}"
    found["hours"] = f"{sum(run.seconds for run in everything) / 3600:.1f}"
    found["seconds"] = f"{np.median([run.seconds for run in everything]):.0f}"
    for name, cells in TABLES.items():
        runs = runs_of(cells)
        where: dict[str, list[Run]] = {name: runs, f"{name} middle": [run for run in runs if run.cell.lr == MIDDLE]}
        for start in dict.fromkeys(cell.start for cell in cells):
            where[f"{name} {TASKS[start]}"] = [run for run in runs if run.cell.start == start]
        for lr in dict.fromkeys(cell.lr for cell in cells):
            where[f"{name} {rate(lr)}"] = [run for run in runs if run.cell.lr == lr]
            for start in dict.fromkeys(cell.start for cell in cells):
                here = [run for run in runs if (run.cell.start, run.cell.lr) == (start, lr)]
                where[f"{name} {TASKS[start]} {rate(lr)}"] = here
        for place, here in where.items():
            found |= _numbers(place, here)
    for name, metrics in {"parts": ("worst", "accuracy", "pass8"), "controls": ("worst", "accuracy", "pass8")}.items():
        found[f"table {name}"] = method_table(TABLES[name], metrics)
    ends = ("worst", "strict", "accuracy", "pass8")
    found["table collapse"] = cell_table(TABLES["collapse"], (*ends, "peak", "above"))
    found["table long"] = cell_table(TABLES["long"], (*ends, "length"))
    found["table paper"] = cell_table(TABLES["paper"], (*ends, "entropy"))
    found["table main"] = grid_table(
        [cell for cell in TABLES["main"] if cell.method == "grpo"],
        ("grpo", "grpo_token_mean", "gtpo"),
        ("worst", "accuracy", "pass8"),
    )
    found["table methods"] = method_table(TABLES["main"], ("worst", "accuracy", "pass8", "peak"))
    found["table agreement"] = agreement_table()
    plain = [run for run in everything if run.cell.method == "grpo"]
    found["prediction"] = f"{prediction(plain):.2f}"
    found["prediction runs"] = f"{sum(map(lost, plain))} of {len(plain)}"
    for start in USUAL:
        found[f"prediction {TASKS[start]}"] = f"{prediction([run for run in plain if run.cell.start == start]):.2f}"
    conflict = [run.curves["conflict"][:20].mean() for run in runs_of(TABLES["main"]) if run.cell.method == "gtpo"]
    found["shares"] = f"{min(conflict):.0%} to {max(conflict):.0%}"
    found |= {f"progress {number(block)}": runs for block, runs in learning_rates.progress()}
    rates = complete(planned("1a"))
    real = {"1": learning_rates.results([*rates, *planned("1b")])} | {
        b: learning_rates.of_real_model(b) for b in ("1b", "9")
    }
    for place, runs in real.items():
        least = learning_rates.least_accuracy(runs) if place == "9" else learning_rates.WRONG
        for method, own in runs.groupby("method"):
            found[f"{place}: {method} lost"] = f"{(own['clean'] < LOST).sum()} of {len(own)}"
            found[f"{place}: {method} wrong"] = f"{(own['accuracy'] < least).sum()} of {len(own)}"
    found["collapsed below"] = str(learning_rates.WRONG)
    found |= _of_real_model() | _of_block_10() | _of_block_11() | _of_part_two()
    found |= {f"block {name}": block12.answer(name) for name in ("12", "12-cpu")}
    found["block 12-cpu without 18"] = block12.without("12-cpu", 18)
    found |= {f"table {name}": table(*of_runs) for name, of_runs in learning_rates.evidence().items()}
    return found | _confirmed()


def _of_real_model() -> dict[str, object]:
    """Numbers of SmolLM2's starts and first steps, of single runs, and exact tests of block 9."""
    starts = {seed: read_log(cell.log(seed)) for cell, seed in complete(planned("1b")) if cell.method == "grpo"}
    found: dict[str, object] = {"1b start": spread([log["steps"]["strict"][0] for log in starts.values()])}
    everywhere = [run for block in ("1a", "1b", "6", "9", "10") for run in complete(planned(block))]
    entropies = [read_log(cell.log(seed))["initial_entropy"] for cell, seed in everywhere]
    found["real initial entropy"] = f"{min(entropies):.2f} to {max(entropies):.2f}" if entropies else "–"
    by_method: dict[str, list[float]] = {}
    for cell, seed in complete(planned("9")):
        curves = read_log(cell.log(seed))["steps"]
        by_method.setdefault(cell.method, []).append(float(np.mean(curves["conflict"][:10])))
        for name, digits in (("length", 0), ("strict", 2)):
            found[f"9: {cell.method} seed {seed} {name}"] = f"{np.mean(curves[name][-5:]):.{digits}f}"
    for method, shares in by_method.items():
        found[f"9: {method} early conflict"] = f"{min(shares):.0%} to {max(shares):.0%}"
    for method in ("masks", "corpo_masks"):
        shares = [block7.touched(read_log(Cell(SCREEN, method, 1e-5).log(seed))["rollouts"][:10]) for seed in SHRUNK]
        found[f"7: {method} touched"] = f"{min(shares):.0%} and {max(shares):.0%}"
    for run in learning_rates.results(planned("9")).to_dict("records"):
        found[f"9: {run['method']} seed {run['seed']} clean"] = f"{run['clean']:.2f}"
    for cell in (Cell(SCREEN, "masks", 1e-5), Cell(LEGS, "gtpo", 1e-5)):
        for name, digits in (("length", 0), ("acc", 2)) if is_stored(cell.log(1)) else ():
            mean = np.mean(read_log(cell.log(1))["steps"][name][25:30])
            found[f"seed 1: {cell.method} {name}"] = f"{mean:.{digits}f}"
    return found


def _of_block_10() -> dict[str, object]:
    """Its answers, tables, counts and differences on each device."""
    found: dict[str, object] = {"again": block10.repeated()}
    for block, device, arms in (("10", "cpu", CONTROL_ARMS), ("10-gpu", "cuda", ON_GPU_ARMS)):
        runs = block10.runs_on(device)
        for name, question in block10.QUESTIONS.items():
            found[f"{block}: {name}"] = block10.answer(question, runs)
        found[f"table arms of {block}"] = markdown(*block10.arm_table(runs, arms))
        found[f"table tests of {block}"] = markdown(*block10.comparison_table(runs))
        for method, own in runs.groupby("method"):
            for what in ("accuracy", "endings", "either"):
                found[f"{block}: {method} {what}"] = f"{own[f'{what} lost'].sum()} of {len(own)}"
        for first, second in block10.COMPARED:
            for metric in ("accuracy", "clean"):
                found[f"{block}: {first} - {second} {metric}"] = block10.difference(runs, first, second, metric)
    return found


def _of_block_11() -> dict[str, object]:
    """Its tables, how often each arm failed, and what the rule says of each comparison."""
    runs = block11.runs()
    found: dict[str, object] = {"table guessing": markdown(*block11.arm_table(runs))}
    found["table guessing pairs"] = markdown(*block11.pair_table(runs))
    for method, own in runs.groupby("method"):
        found |= {f"11: {method} {name}": f"{own[name].sum()} of {len(own)}" for name in ("gave up", "stopped")}
    found |= {f"11: {one} - {other}": block11.judge(runs, one, other).verdict for one, other in block11.PAIRS}
    return found


def _of_part_two() -> dict[str, object]:
    """Numbers of blocks 2, 3, 4, 8 over all their runs, and of 1b, 1c, 9, 2, 3, 5 at each method's own best rate."""
    curves = [read_log(c.log(seed))["steps"] for block in ("2", "5", "8", "11") for c, seed in complete(planned(block))]
    dropped = max((np.mean(steps["dropped"]) for steps in curves if "dropped" in steps), default=0)
    found: dict[str, object] = {"most dropped": f"{dropped:.1%}"}
    for block in "2348":
        runs = learning_rates.rivals() if block == "3" else learning_rates.results(planned(block))
        places = {block: runs, f"{block} planned": runs[runs["lr"].isin(MANY_RATES)]}
        for place, here in (places | {f"{block} {task}": own for task, own in runs.groupby("task")}).items():
            for method, own in here.groupby("method"):
                found[f"{place}: {method} lost"] = f"{(own['clean'] < LOST).sum()} of {len(own)}"
                found[f"{place}: {method} lowest accuracy"] = f"{own['accuracy'].min():.2f}"
                found[f"{place}: {method} entropy"] = f"{own['entropy'].mean():.2f}"
                found[f"{place}: {method} conflict"] = f"{own['conflict'].mean():.0%}"
    best = learning_rates.at_best()
    places = {f"{block} best": runs for block, runs in best.items()} | {"8": learning_rates.results(planned("8"))}
    places |= {f"{block} clean": runs for block, runs in learning_rates.at_best(CLEAN).items() if block != "5"}
    places |= {block: learning_rates.of_real_model(block) for block in ("1b", "1c", "9")}
    places |= {f"{place} {task}": own for place, runs in places.items() for task, own in runs.groupby("task")}
    metrics = (*learning_rates.ENDPOINTS, "template")
    for place, here in places.items():
        found[f"{place}: highest accuracy"] = f"{here['accuracy'].max():.2f}"
        for method, own in here.groupby("method"):
            found |= {f"{place}: {method} {name}": f"{own[name].mean():.2f}" for name in metrics}
            found[f"{place}: {method} conflict"] = f"{own['conflict'].mean():.0%}"
        methods = here["method"].unique()
        ours = [method for method in methods if set(GTPO) & set(METHODS[method])]
        for one, other, name in product(ours, methods, metrics):
            if one != other:
                found[f"{place}: {one} - {other} {name}"] = learning_rates.compare(here, one, other, name)
    return found


def _numbers(place: str, runs: Sequence[Run]) -> dict[str, object]:
    if not runs:
        return {}
    found: dict[str, object] = {f"{place}: highest accuracy": f"{max(run.summary['accuracy'] for run in runs):.2f}"}
    methods = list(dict.fromkeys(run.cell.method for run in runs))
    for method in methods:
        own = [run for run in runs if run.cell.method == method]
        found[f"{place}: {method} lost"] = f"{sum(map(lost, own))} of {len(own)}"
        for metric in METRICS:
            values = [run.summary[metric] for run in own]
            found[f"{place}: {method} {metric}"] = f"{np.mean(values):.2f}"
            found[f"{place}: {method} lowest {metric}"] = f"{min(values):.2f}"
            found[f"{place}: {method} highest {metric}"] = f"{max(values):.2f}"
        for other in methods:
            for metric in METRICS if other != method else ():
                comparison = compare(runs, method, other, metric)
                if comparison.differences:
                    key = f"{place}: {method} - {other} {metric}"
                    found[key] = comparison
                    found[f"{key} higher"] = f"{comparison.higher} of {len(comparison.differences)}"
    return found


def _confirmed() -> dict[str, object]:
    """Numbers of the runs under verl: pairs of the rates that were chosen, and of equal rates."""
    found: dict[str, object] = {"verl runs": str(len(verl_runs.runs()))}
    runs = {(run.cell.start, run.cell.method, run.cell.lr, run.seed): run.summary for run in confirmations(600)}
    chosen = [
        ((start, seed), summary, runs[start, "gtpo", MIDDLE, seed])
        for (start, method, lr, seed), summary in runs.items()
        if (method, lr) == ("grpo", RATES[0]) and start in USUAL and (start, "gtpo", MIDDLE, seed) in runs
    ]
    equal = [
        ((start, seed), summary, runs[start, "gtpo", lr, seed])
        for (start, method, lr, seed), summary in runs.items()
        if method == "grpo" and (start, "gtpo", lr, seed) in runs and start.warm_steps == Start("").warm_steps
    ]
    for name, pairs in {"verl chosen": chosen, "verl equal": equal}.items():
        for metric in ("worst", "accuracy", "pass8", "entropy", "strict"):
            differences = [gtpo[metric] - grpo[metric] for _, grpo, gtpo in pairs]
            comparison = Comparison(differences, [cluster for cluster, *_ in pairs])
            found[f"{name} {metric}"] = comparison
            found[f"{name} {metric} higher"] = f"{comparison.higher} of {len(pairs)}"
    for run in confirmations(600):
        key = f"verl {run.cell.start.name} {run.cell.method} {rate(run.cell.lr)} seed {run.seed}"
        found |= {f"{key} {metric}": f"{value:.2f}" for metric, value in run.summary.items()}
    return found


def render(template: str, numbers: Mapping[str, object]) -> str:
    """The page: the template with every {{name}} replaced, and its text wrapped again.

    Raises:
        KeyError: a name that stands for nothing.
    """
    page = re.sub(r"\{\{(.+?)\}\}", lambda match: str(numbers[" ".join(match[1].split())]), template, flags=re.DOTALL)
    parts = page.split("```")
    text = r"^(?:[-*\w(]|\d\.).*(?:\n[^\n|#!].*)*"
    parts[::2] = [re.sub(text, _wrap, part, flags=re.MULTILINE) for part in parts[::2]]
    return "```".join(parts)


def _wrap(block: re.Match[str]) -> str:
    """A paragraph or a list, at 120 characters."""
    items = re.split(r"\n(?=- |\d+\. )", block[0])
    indents = [re.match(r"- |\d+\. |", item)[0] for item in items]  # type: ignore[index]
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            120,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for item, indent in zip(items, indents, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write everything."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    if not complete(one_prompt()):
        print("no run of part one: studies/results/one-prompt.zip is missing", file=sys.stderr)
        return 1
    numbers = facts()
    OUT.mkdir(parents=True, exist_ok=True)
    sections = [f"## {name}\n\n{cell_table(cells)}" for name, cells in TABLES.items()]
    for name, runs in blocks().items():
        own = learning_rates.results([(cell, seed) for cell, seed in runs if cell.start.evaluated])
        if len(own):
            sections.append(f"## Part two, block {name}\n\n{markdown(*learning_rates.block_table(own))}")
    sections += [f"## {title}\n\n{numbers[f'table {name}']}" for name, title in FURTHER.items()]
    sections.append(f"## Under verl and in the fast loop\n\n{numbers['table agreement']}")
    head = f"# Tables of the study\n\n{numbers['runs']} runs. Mean of a cell's runs (smallest–largest)."
    head += " Made by `python -m studies.report`."
    TABLES_PAGE.write_text("\n\n".join([head, *sections]) + "\n")
    with RUNS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["start", "method", "rate", "seed", *METRICS, "push", *(f"pass@{k}" for k in K)])
        for run in runs_of(cell for cells in TABLES.values() for cell in cells):
            row = [run.cell.start.name, run.cell.method, rate(run.cell.lr), run.seed]
            writer.writerow([*row, *(f"{v:.4f}" for v in (*run.summary.values(), *run.pass_at.values()))])
    for name, page in PAGES.items():
        page.write_text(render((HERE / f"{name}.template").read_text(), numbers))
    written: list[Path] = [TABLES_PAGE, RUNS, *PAGES.values()]
    for figure in (figures.answer, figures.shrinking, figures.overview, figures.collapse):
        written += save(figure(), OUT / figure.__name__)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
