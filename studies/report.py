"""Tables, figures and the pages of the study, from the logs in results/: docs/study.md, its figures, and the lab book.

A page is its template with the {{names}} replaced by numbers of this module: no number is typed.
"""

import argparse
import csv
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gtpo_verl.algorithm.config import LN2
from recipes.paper.plots import save
from studies import block7, block10, block11, block12, block13, block15, figures, tables, titles, verl_runs
from studies.comparisons import (
    ENDPOINTS,
    PER_RATE,
    WRONG,
    at_best,
    compare,
    least_accuracy,
    prediction,
    rivals,
    with_failures,
)
from studies.plan import (
    BOTH_CLAMPED,
    CLAMPED,
    CONTROL_ARMS,
    CONTROL_SEEDS,
    GTPO,
    HERE,
    LEAST_EXACT_FORMAT,
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
    USED_ARMS,
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
from studies.runs import K, load, one_prompt_runs, results, stretches
from studies.statistics import Comparison, described, iqm
from studies.tables import markdown, spread
from studies.titles import METRICS, TASKS, rate

OUT = ROOT / "docs/results/study"
PAGES = {
    "page": ROOT / "docs/study.md",
    "experiments": HERE / "EXPERIMENTS.md",
    "one_prompt": HERE / "ONE_PROMPT.md",
}
"""By the name of their templates."""
TABLES_PAGE, RUNS = HERE / "TABLES.md", HERE / "results/one-prompt.csv"
SETTLED, LAST = 100, 100
"""Of the runs under verl: the steps that the worst stretch leaves out, and those at the end."""
REAL = ("1a", "1b", "1c", "6", "9", "9-again", "10", "10-gpu", "12-cpu", "12", "12-beside", "13-cpu", "13", "14")
"""Blocks of SmolLM2 whose held-out questions were asked."""
FURTHER = {
    "form": "SmolLM2: the three measures of the form, by method",
    "many": "Block 2, learning rates chosen by accuracy alone",
    "rivals": "Block 3, learning rates chosen by accuracy alone",
    "rivals, exact format": "Block 3, learning rates chosen among those with an exact format of at least 0.9",
    "many, exact format": "Block 2, learning rates chosen among those with an exact format of at least 0.9",
    "equal rates": "Block 2 at equal learning rates",
    "fresh": "Block 5, fresh seeds",
    "real by seed": "Block 1b by seed",
    "by share": "Blocks 2 and 4 by share of conflict tokens in GRPO's steps 1 to 20, GTPO minus GRPO",
    "candidates": "Block 8",
    "borne": "Block 2, learning rates within 0.05 of the method's best accuracy, with an exact format of at least 0.9",
    "real parts": "Block 6 by seed",
    "screened": "Block 7, seeds 3 and 6: push towards the short answer, and the last five steps",
    "real": "Block 1b, each method minus GTPO",
    "longer": "Block 1c, GRPO minus GTPO",
    "longer by seed": "Block 1c by seed",
    "longest by seed": "Block 4, after 440 characters, by seed",
    "confirmed by seed": "Block 9 by seed",
    "tests of 10": "Block 10 on CPUs, with block 9: pairs of methods (p of sign flips)",
    "tests of 10-gpu": "Block 10 on a GPU: pairs of methods (p of sign flips)",
    "guessing pairs": "Block 11: pairs of methods",
    "better": "Every mean above GTPO's at chosen learning rates, the method minus GTPO",
    "form by run": "SmolLM2: the three measures of the form, by run",
}
"""Tables of TABLES.md beside those of cells, and their titles."""


class Confirmed(NamedTuple):
    """A run under verl. Its `strict` does not ask for EOS, which is why the worst takes the lower of both."""

    cell: Cell
    seed: int
    summary: Mapping[str, float]


@functools.cache
def confirmations(steps: int) -> list[Confirmed]:
    """Return the runs under verl, as if they had ended after so many steps."""
    found = []
    for cell, seed in verl_runs.runs():
        logged = pd.DataFrame.from_dict(verl_runs.read_steps(cell, seed), orient="index")
        values = {name: column[:steps].to_numpy() for name, column in logged.items()}
        strict = np.minimum(values["reward/strict/mean"], values["completion/eos_rate"])
        summary = {
            "worst": float(stretches(strict[SETTLED:]).min()),
            "last_exact_format": float(strict[-LAST:].mean()),
            "accuracy": float(values["reward/acc/mean"][-LAST:].mean()),
            "pass8": float((values["reward/acc/mean"][-3 * LAST :] > 0).mean()),
            "entropy": float(values["actor/entropy"][-LAST:].mean()),
            "peak": float(stretches(values["actor/entropy"]).max()),
        }
        found.append(Confirmed(cell, seed, summary))
    return found


def agreement_table() -> str:
    """Return cells that were run both under verl and in the fast loop, over the fast loop's number of steps."""
    rows = []
    main = [load(*run) for run in one_prompt_runs(TABLES["main"])]
    steps = max(len(run.curves["acc"]) for run in main)
    for cell in dict.fromkeys(run.cell for run in confirmations(steps) if run.cell in TABLES["main"]):
        fast = [run for run in main if run.cell == cell]
        under_verl = [run for run in confirmations(steps) if run.cell == cell]
        row = [TASKS[cell.start], titles.METHODS[cell.method], rate(cell.lr), f"{len(under_verl)}, {len(fast)}"]
        for name in ("worst", "accuracy", "entropy"):
            ours = [run.summary[name] for run in fast]
            if name == "accuracy":
                ours = [float(run.curves["acc"][-LAST:].mean()) for run in fast]
            row += [spread([run.summary[name] for run in under_verl]), spread(ours)]
        rows.append(row)
    columns = [f"{METRICS[name]}: {where}" for name in ("worst", "accuracy", "entropy") for where in ("verl", "fast")]
    return markdown(["task", "method", "learning rate", "runs: verl, fast", *columns], rows)


class Facts(dict[str, object]):
    """Numbers and tables by name. The page names few of the comparisons, which are made when they are asked for."""

    def __getitem__(self, name: str) -> object:
        """Return a number, or a table.

        Raises:
            KeyError: there is none of this name.
        """
        value = super().__getitem__(name)
        return value() if callable(value) else value


def facts() -> Facts:
    """Return every number and table that the templates of `PAGES` name."""
    found = Facts(ln2=f"{LN2:.3f}")
    found |= {f"progress {number(block)}": runs for block, runs in tables.progress()}
    found |= _of_one_prompt() | _of_verl()
    found |= _of_many_prompts() | _of_real_model() | _of_form() | _of_controls() | _of_guessing() | _of_fresh_seeds()
    found |= _of_the_page()
    found |= {f"table {name}": markdown(*of_runs) for name, of_runs in tables.of_many_prompts().items()}
    found["table screened"] = markdown(*block7.table())
    return found


def _of_one_prompt() -> dict[str, object]:
    """Numbers and tables of the runs with one prompt a step."""
    every_cell = list(dict.fromkeys(cell for cells in TABLES.values() for cell in cells))
    every_run = one_prompt_runs(every_cell)
    seconds = [load(*run).seconds for run in every_run]
    found: dict[str, object] = {
        "runs": f"{len(every_run)} of {len(one_prompt())}",
        "hours": f"{sum(seconds) / 3600:.1f}",
        "seconds": f"{np.median(seconds):.0f}",
    }
    for name, cells in TABLES.items():
        runs = results(one_prompt_runs(cells))
        places = {name: runs, f"{name} middle": runs[runs["lr"] == MIDDLE]}
        places |= {f"{name} {task}": here for task, here in runs.groupby("task")}
        places |= {f"{name} {rate(lr)}": here for lr, here in runs.groupby("lr")}
        places |= {f"{name} {task} {rate(lr)}": here for (task, lr), here in runs.groupby(["task", "lr"])}
        for place, here in places.items():
            found |= _numbers(place, here, tables.ONE_PROMPT, PER_RATE)
    ends = ("worst", "last_exact_format", "accuracy", "pass8")
    of_table = {name: results(one_prompt_runs(cells)) for name, cells in TABLES.items()}
    for name in ("parts", "controls"):
        parts = tables.method_table(of_table[name], ("worst", "accuracy", "pass8"), "grpo", iqm, PER_RATE)
        found[f"table {name}"] = markdown(*parts)
    found["table methods"] = markdown(
        *tables.method_table(of_table["main"], ("worst", "accuracy", "pass8", "peak"), "grpo", iqm, PER_RATE)
    )
    for name, metrics in {"collapse": (*ends, "peak", "above"), "long": (*ends, "length")}.items():
        found[f"table {name}"] = markdown(*tables.cell_table(of_table[name], metrics))
    found["table paper"] = markdown(*tables.cell_table(of_table["paper"], (*ends, "entropy")))
    main = of_table["main"][of_table["main"]["method"] != "grpo_kl"]
    found["table main"] = markdown(
        *tables.grid_table(main, ("grpo", "grpo_token_mean", "gtpo"), ("worst", "accuracy", "pass8"))
    )
    found["table agreement"] = agreement_table()
    everything = results(every_run)
    plain = everything[everything["method"] == "grpo"]
    found["prediction"] = f"{prediction(plain):.2f}"
    found["prediction runs"] = tables.count(plain["lost"])
    for start in USUAL:
        found[f"prediction {TASKS[start]}"] = f"{prediction(plain[plain['task'] == TASKS[start]]):.2f}"
    conflict = of_table["main"][of_table["main"]["method"] == "gtpo"]["conflict"]
    found["shares"] = f"{conflict.min():.0%} to {conflict.max():.0%}"
    return found


def _numbers(
    place: str, runs: pd.DataFrame, metrics: Sequence[str], pairs: Sequence[str] = ("task", "seed"), gtpo: bool = False
) -> dict[str, object]:
    """Return the numbers of each method, and of each pair of methods; with `gtpo` only of pairs whose first uses it."""
    if runs.empty:
        return {}
    found: dict[str, object] = {f"{place}: highest accuracy": f"{runs['accuracy'].max():.2f}"}
    methods = list(runs["method"].unique())
    for method in methods:
        here = runs[runs["method"] == method]
        for flag in {"lost", "collapsed", "failed"} & set(runs.columns):
            found[f"{place}: {method} {flag}"] = tables.count(here[flag])
        found[f"{place}: {method} no eos"] = tables.count(here["eos"] < 0.5)
        found[f"{place}: {method} conflict"] = f"{here['conflict'].mean():.0%}"
        for metric in metrics:
            found[f"{place}: {method} {metric}"] = f"{here[metric].mean():.2f}"
            found[f"{place}: {method} lowest {metric}"] = f"{here[metric].min():.2f}"
            found[f"{place}: {method} highest {metric}"] = f"{here[metric].max():.2f}"
    for first, second, metric in product(methods, methods, metrics):
        if first == second or gtpo and not set(GTPO) & set(METHODS[first]):
            continue
        comparison = functools.partial(compare, runs, first, second, metric, pairs)
        found[f"{place}: {first} - {second} {metric}"] = comparison
        found[f"{place}: {first} - {second} {metric} higher"] = functools.partial(_higher, comparison)
    return found


def _higher(comparison: Callable[[], Comparison]) -> str:
    differences = comparison().differences
    return f"{sum(difference > 0 for difference in differences)} of {len(differences)}"


def _of_many_prompts() -> dict[str, object]:
    """Numbers of blocks 2, 3, 4, 8 over all their runs, and of 1b, 1c, 9, 2, 3, 5 at each method's own best rate."""
    curves = [read_log(c.log(seed))["steps"] for block in ("2", "5", "8", "11") for c, seed in complete(planned(block))]
    dropped = max((np.mean(steps["dropped"]) for steps in curves if "dropped" in steps), default=0)
    found: dict[str, object] = {"most dropped": f"{dropped:.1%}"}
    places: dict[str, pd.DataFrame] = {}
    for block in ("2", "3", "4", "8"):
        runs = rivals() if block == "3" else results(planned(block))
        places |= {block: runs, f"{block} planned": runs[runs["lr"].isin(MANY_RATES)]}
    places |= {f"{block} best": runs for block, runs in at_best().items() if block != "5"}
    places |= {f"{block} kept": runs for block, runs in at_best(LEAST_EXACT_FORMAT).items()}
    places["1c"] = tables.of_block("1c")
    places |= {f"{place} {task}": here for place, runs in places.items() for task, here in runs.groupby("task")}
    metrics = (*ENDPOINTS, "template", "entropy", "eos", "well_formed")
    for place, here in places.items():
        found |= _numbers(place, here, metrics, gtpo=True)
    return found


def _of_real_model() -> dict[str, object]:
    """Numbers of SmolLM2's starts and first steps, of blocks 1 and 9, and of single runs."""
    found: dict[str, object] = {"collapsed below": str(WRONG)}
    metrics = (*ENDPOINTS, "eos", "well_formed", "conflict")
    fresh = with_failures(tables.of_block("1b"), WRONG)
    both = with_failures(results([*planned("1a"), *planned("1b")]), WRONG)
    confirmed = tables.of_block("9")
    confirmed = with_failures(confirmed, least_accuracy(confirmed))
    for place, runs in {"1": both, "1b": fresh, "9": confirmed}.items():
        found |= _numbers(place, runs, metrics, gtpo=True)
    for lr in (5e-6, 1e-5):
        here = results((Cell(LEGS, "grpo", lr), seed) for seed in (1, *SHRUNK))
        found[f"grpo at {rate(lr)}"] = ", ".join(f"{share:.2f}" for share in here["exact_format"])
    starts = {seed: read_log(cell.log(seed)) for cell, seed in complete(planned("1b")) if cell.method == "grpo"}
    found["1b start"] = spread([log["steps"]["strict"][0] for log in starts.values()])
    everywhere = [run for block in ("1a", "1b", "6", "9", "10") for run in complete(planned(block))]
    entropies = [read_log(cell.log(seed))["initial_entropy"] for cell, seed in everywhere]
    found["real initial entropy"] = f"{min(entropies):.2f} to {max(entropies):.2f}" if entropies else "–"
    for cell, seed in complete(planned("9")):
        curves = read_log(cell.log(seed))["steps"]
        found[f"9: {cell.method} seed {seed} length"] = f"{np.mean(curves['length'][-5:]):.0f}"
    for run in results(planned("9")).to_dict("records"):
        found[f"9: {run['method']} seed {run['seed']} exact_format"] = f"{run['exact_format']:.2f}"
    for method in ("masks", "corpo_masks"):
        shares = [block7.touched(read_log(Cell(SCREEN, method, 1e-5).log(seed))["rollouts"][:10]) for seed in SHRUNK]
        found[f"7: {method} touched"] = f"{min(shares):.0%} and {max(shares):.0%}"
    for cell in (Cell(SCREEN, "masks", 1e-5), Cell(LEGS, "gtpo", 1e-5)):
        for name, digits in (("length", 0), ("acc", 2)) if is_stored(cell.log(1)) else ():
            mean = np.mean(read_log(cell.log(1))["steps"][name][25:30])
            found[f"seed 1: {cell.method} {name}"] = f"{mean:.{digits}f}"
    return found


def _of_the_page() -> dict[str, object]:
    """The table of the runs that failed, and counts over all runs of SmolLM2 at 1e-5."""
    on_cpus = block10.runs_on("cpu")
    on_gpu = block10.runs_on("cuda")
    chosen = with_failures(tables.of_block("1b"), WRONG)
    fresh = with_failures(block12.pairs("12-cpu"), WRONG)
    rows = {
        "9 and 10, CPUs": (on_cpus, ("grpo", "grpo_clamped", "gtpo", CLAMPED)),
        "10, GPU": (on_gpu, ("grpo", "grpo_clamped", "gtpo", CLAMPED)),
        "12, CPUs": (fresh, BOTH_CLAMPED),
        "1b, CPUs": (chosen, ("grpo", "gtpo", "grpo_strict", "gtpo_strict")),
        "10, GPU, other reward": (on_gpu, ("grpo_answer", "gtpo_answer")),
        "2, tiny model": (figures.planned_rates(), ("grpo", "gtpo")),
    }
    if block13.is_whole("13-cpu"):
        users, _ = block13.made("13-cpu")
        plain = users[users["lr"] == USED_ARMS["A"][1]]
        rows["13, CPUs"] = (with_failures(users, least_accuracy(plain)), ("grpo", CLAMPED))
    found: dict[str, object] = {"table methods of the page": markdown(*tables.experiment_table(rows))}
    first = with_failures(results(planned("1a")), WRONG)
    everywhere = pd.concat([first, chosen, on_cpus, on_gpu, fresh])
    at_same_rate = everywhere[everywhere["lr"] == 1e-5]
    pairs = pd.concat([on_cpus, on_gpu, fresh])
    for method in ("grpo", "grpo_clamped", "gtpo", CLAMPED):
        here = pairs[(pairs["method"] == method) & (pairs["lr"] == 1e-5)]
        found[f"1e-5: {method} failed"] = tables.count(here["failed"])
        found[f"1e-5: {method} collapsed"] = tables.count(here["collapsed"])
        here = at_same_rate[at_same_rate["method"] == method]
        found[f"1e-5: {method} lost"] = tables.count(here["lost"])
        found[f"1e-5: {method} no eos"] = tables.count(here["eos"] < 0.5)
        found[f"1e-5: {method} malformed"] = tables.count(here["well_formed"] < 0.5)
    other = pd.concat([chosen[chosen["method"] == "grpo_strict"], on_gpu[on_gpu["method"] == "grpo_answer"]])
    found["other rewards: grpo lost"] = tables.count(other["lost"])
    return found


def _of_form() -> dict[str, object]:
    """Tables of the three measures of SmolLM2's form."""
    of_blocks = {block: results(planned(block)) for block in REAL}
    of_blocks = {block: runs for block, runs in of_blocks.items() if not runs.empty}
    if not block13.is_whole("13-cpu"):
        of_blocks.pop("13-cpu", None)
    return {
        "table form": markdown(*tables.form_summary(of_blocks)),
        "table form by run": markdown(*tables.form_table(of_blocks)),
    }


def _of_controls() -> dict[str, object]:
    """Answers, tables, counts and differences of block 10 on each device."""
    found: dict[str, object] = {"again": block10.repeated()}
    for block, device, arms in (("10", "cpu", CONTROL_ARMS), ("10-gpu", "cuda", ON_GPU_ARMS)):
        runs = block10.runs_on(device)
        for name, question in block10.QUESTIONS.items():
            found[f"{block}: {name}"] = block10.answer(question, runs)
        found |= _numbers(block, runs, ("accuracy", "exact_format"), gtpo=True)
        found[f"table arms of {block}"] = markdown(*tables.failure_table(runs, arms))
        found[f"table tests of {block}"] = markdown(
            *tables.comparison_table(runs, block10.COMPARED, len(CONTROL_SEEDS))
        )
        for first, second in block10.COMPARED:
            for metric in tables.MEASURED:
                found[f"{block}: {first} - {second} {metric}"] = block10.difference(runs, first, second, metric)
    runs = block10.runs_on("cpu")
    found["table confirmed"] = markdown(*tables.failure_table(runs, ("grpo", "gtpo", CLAMPED, "corpo_masks"), "gtpo"))
    return found


def _of_guessing() -> dict[str, object]:
    """Tables of block 11, how often each method failed, and what the rule says of each comparison."""
    runs = block11.runs()
    found: dict[str, object] = {"table guessing": markdown(*block11.arm_table(runs))}
    found["table guessing pairs"] = markdown(*block11.pair_table(runs))
    for method, here in runs.groupby("method"):
        found |= {f"11: {method} {name}": tables.count(here[name]) for name in ("gave up", "lost", "failed")}
        found[f"11: {method} no eos"] = tables.count(here["eos"] < 0.5)
    found |= {f"11: {one} - {other}": block11.judge(runs, one, other).verdict for one, other in block11.PAIRS}
    return found


def _of_fresh_seeds() -> dict[str, object]:
    """Answers, differences and tables of blocks 12 to 15."""
    found: dict[str, object] = {f"block {name}": block12.answer(name) for name in ("12", "12-cpu")}
    found["block 12-cpu without 18"] = block12.without("12-cpu", 18)
    runs = block12.pairs("12-cpu")
    grpo, gtpo = BOTH_CLAMPED
    found["12-cpu: verdict"] = block12.verdict(compare(runs, gtpo, grpo, "exact_format").differences)
    for seed in (15, 17):
        lowest = stretches(load(Cell(LEGS, grpo, 1e-5), seed).curves["strict"], 10).min()
        found[f"12-cpu: seed {seed} low"] = f"{lowest:.2f}"
    for metric in (*tables.MEASURED, "exact_format_of_texts"):
        found[f"12-cpu: {metric}"] = compare(runs, gtpo, grpo, metric)
        found[f"12-cpu: {metric} with p"] = described(compare(runs, gtpo, grpo, metric))
    found |= _numbers("12-cpu", with_failures(runs, WRONG), tables.MEASURED)
    for name, of_control in block13.answers("13-cpu").items():
        found[f"block 13-cpu {name}"] = of_control
    found["block 13-cpu without split seeds"] = block13.without_split_seeds("13-cpu")
    header, rows = block13.table("13-cpu")
    found["table block 13-cpu"] = markdown(header, rows) if rows else "No seed is whole yet."
    found["block 14"] = block13.answer_alone()
    header, rows = block15.table()
    found["table block 15"] = markdown(header, rows) if rows else f"The runs: {block15.progress()}."
    return found


def _of_verl() -> dict[str, object]:
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
        for metric in ("worst", "accuracy", "pass8", "entropy", "last_exact_format"):
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


def tables_page(numbers: Mapping[str, object]) -> str:
    """Return the page with a table for each part and block."""
    head = f"# Tables of the study\n\n{numbers['runs']} runs with one prompt a step. Mean of a cell's runs"
    head += (
        " (smallest–largest). *Exact format*, *well formed up to `</answer>`* and *ends with EOS*: shares of held-out"
    )
    head += (
        " completions; the last two of one stored text a question in blocks 1 to 12. A dash: not in the logs. Made by"
    )
    sections = [head + " `python -m studies.report`."]
    for name, cells in TABLES.items():
        table = tables.cell_table(results(one_prompt_runs(cells)), tables.ONE_PROMPT)
        sections.append(f"## {name}\n\n{markdown(*table)}")
    for name, runs in blocks().items():
        if number(name) == "13-cpu" and not block13.is_whole("13-cpu"):
            continue
        of_block = results([(cell, seed) for cell, seed in runs if cell.start.evaluated])
        if len(of_block):
            table = tables.cell_table(of_block, tables.MANY_PROMPTS, tables.mean)
            sections.append(f"## Part two, block {name}\n\n{markdown(*table)}")
    sections += [f"## {title}\n\n{numbers[f'table {name}']}" for name, title in FURTHER.items()]
    sections.append(f"## Under verl and in the fast loop\n\n{numbers['table agreement']}")
    return "\n\n".join(sections) + "\n"


def write_runs() -> None:
    """Write a line of numbers for each run with one prompt a step."""
    with RUNS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        metrics = [name for name in tables.ONE_PROMPT if name != "last_eos"] + ["push"]
        writer.writerow(["start", "method", "rate", "seed", *metrics, *(f"pass@{k}" for k in K)])
        for cell, seed in one_prompt_runs(cell for cells in TABLES.values() for cell in cells):
            run = load(cell, seed)
            values = [run.summary[name] for name in metrics] + [run.pass_at[k] for k in K]
            writer.writerow([cell.start.name, cell.method, rate(cell.lr), seed, *(f"{value:.4f}" for value in values)])


def main(argv: Sequence[str] | None = None) -> int:
    """Write everything."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    if not complete(one_prompt()):
        print("no run of part one: studies/results/one-prompt.zip is missing", file=sys.stderr)
        return 1
    numbers = facts()
    OUT.mkdir(parents=True, exist_ok=True)
    TABLES_PAGE.write_text(tables_page(numbers))
    write_runs()
    for name, page in PAGES.items():
        page.write_text(render((HERE / f"{name}.template").read_text(), numbers))
    written: list[Path] = [TABLES_PAGE, RUNS, *PAGES.values()]
    for figure in (figures.answer, figures.shrinking, figures.overview, figures.collapse):
        written += save(figure(), OUT / figure.__name__)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
