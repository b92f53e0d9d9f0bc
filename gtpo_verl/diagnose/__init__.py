"""`gtpo-verl diagnose`: what is wrong with a run, and would GTPO (arXiv:2508.03772) change it, from its files.

It reads what a trainer logged (`frameworks`), looks for the signs that the watch in training looks for (`signs`), and
reads completions if there are any (`rollouts`). `evidence.json` is what this project's stored runs say.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Mapping
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

from gtpo_verl.links import DOCS
from gtpo_verl.monitor.frameworks import FRAMEWORKS, translate
from gtpo_verl.monitor.logs import read_metrics
from gtpo_verl.monitor.signs import NUMBERS, SIGNS, Sign, Watch, label, outcomes, window
from gtpo_verl.records import read_record

if TYPE_CHECKING:
    from gtpo_verl.diagnose.rollouts import Rollouts

BAD_INPUT = 4
STATUS = {"healthy": 0, "degraded": 1, "failed": 2, "cannot tell": 3}
EVIDENCE = json.loads((files(__package__) / "evidence.json").read_text())
_WIDTH = 80

Steps = dict[int, dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.description = "Say what is wrong with a run, from files that it left, and whether GTPO would change it."
    parser.epilog = (
        "example: gtpo-verl diagnose outputs/run/metrics.jsonl                       verl's file logger\n"
        "         gtpo-verl diagnose metrics.jsonl --rollouts rollouts --tokenizer MODEL\n"
        "         gtpo-verl diagnose checkpoint-500/trainer_state.json               TRL\n"
        "         gtpo-verl diagnose tensorboard/run                                 OpenRLHF\n"
        "status:  0 healthy, 1 degraded, 2 failed, 3 cannot tell, 4 bad input"
    )
    parser.add_argument(
        "log",
        metavar="LOG",
        type=Path,
        help="verl's JSONL (trainer.logger=file), TRL's trainer_state.json, OpenRLHF's TensorBoard events, a folder "
        "with one of these, or a folder of rollouts alone",
    )
    parser.add_argument("--rollouts", type=Path, help="the run's completions: trainer.rollout_data_dir, or a dump_dir")
    parser.add_argument("--tokenizer", help="folder or Hub name of the run's tokenizer, for verl's rollouts")
    parser.add_argument("--limit", type=int, help="tokens at which completions are cut: data.max_response_length")
    parser.add_argument("--completions", type=int, help="completions per step, where the log does not show how many")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def error(message: str) -> NoReturn:  # argparse's own status means failed here
        parser.print_usage(sys.stderr)
        parser.exit(BAD_INPUT, f"{parser.prog}: {message}\n")

    parser.error = error  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    if any(number is not None and number < 1 for number in (args.limit, args.completions)):
        raise ValueError("--limit and --completions must be at least 1")
    report = diagnose(args.log, args.rollouts, args.tokenizer, args.limit, args.completions)
    print(json.dumps(report, indent=1) if args.json else screen(report))
    return STATUS[report["verdict"]]


# ---------------------------------------------------------------- reading


def read_log(path: Path) -> tuple[Path, str, Steps]:
    """What a trainer logged at each step, and which trainer.

    Raises:
        ValueError: there is no log, or more than one.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: name the run's metrics.jsonl, trainer_state.json or TensorBoard folder"
        )
    if path.is_dir():
        patterns = ("metrics.jsonl", "trainer_state.json", "*.jsonl", "*.jsonl.gz", "*tfevents*")
        found = next(filter(None, (sorted(path.glob(pattern)) for pattern in patterns)), [])
        if len(found) != 1:
            names = ", ".join([*(file.name for file in found[:3]), *["…"] * (len(found) > 3)])
            logs = f"{len(found)} logs ({names})" if found else "no log"
            raise ValueError(f"{path} has {logs}: name the file of one run")
        path = found[0]
    if "tfevents" in path.name:
        return path, "OpenRLHF", _read_events(path)
    if path.suffix == ".json":
        return path, "TRL", _read_history(path)
    return path, "verl", read_metrics(path)


def _read_history(path: Path) -> Steps:
    steps: Steps = {}
    for entry in read_record(path, "log_history")["log_history"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(f"{path} has an entry without a step in its log_history: is it TRL's trainer_state.json?")
        steps.setdefault(entry["step"], {}).update(entry)
    return steps


def _read_events(path: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    steps: Steps = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps.setdefault(event.step, {})[tag.removeprefix("train/")] = event.value
    return steps


def completions_per_step(steps: Steps) -> int:
    """Of how many completions the shares in a log are, at least: their least common denominator."""
    shares = (numbers[name] for numbers in steps.values() for name in ("ended", "cut", "strict") if name in numbers)
    return math.lcm(*{Fraction(share).limit_denominator(2000).denominator for share in shares})


# ---------------------------------------------------------------- judging


def diagnose(
    log: Path,
    rollouts: Path | None = None,
    tokenizer: str | None = None,
    limit: float | None = None,
    completions: int | None = None,
) -> dict[str, Any]:
    """The report on a run, as `--json` prints it.

    Args:
        log: what the trainer logged, or a folder of rollouts alone.
        rollouts: a token dump or verl's rollouts.
        tokenizer: of the run, for verl's rollouts.
        limit: tokens at which completions are cut off; None: what the log shows.
        completions: per step; None: what the log shows.

    Raises:
        ValueError: nothing can be made of these files; the message names the file and a remedy.
    """
    framework, steps, seen, applied = "verl", {}, None, False
    if rollouts is None and log.is_dir() and any(log.glob("gtpo_dump.json")) | any(log.glob("[0-9]*.jsonl")):
        rollouts = log
    else:
        log, framework, logged = read_log(log)
        applied = any("gtpo/filter/active" in metrics for metrics in logged.values())
        steps = {step: translate(metrics, framework, limit) for step, metrics in logged.items()}
        steps = {step: numbers for step, numbers in steps.items() if numbers.keys() & NUMBERS.keys()}
        if not steps:
            raise ValueError(f"{log} has none of the metrics of {framework} that diagnose reads: {DOCS}/diagnose.md")
        cut = [x["longest"] for x in steps.values() if "longest" in x and x.get("ended", 1) < 1]
        limit = limit or max(cut, default=None)
    if rollouts is not None:
        from gtpo_verl.diagnose.rollouts import read_rollouts

        seen = read_rollouts(rollouts, tokenizer, limit)
        for step, numbers in seen.steps.items():
            length = steps.get(step, {}).get("length", numbers["length"])
            if not 0.8 * length <= numbers["length"] + 1 <= 1.25 * length + 2:
                raise ValueError(
                    f"{rollouts} has {numbers['length']:.0f} tokens a completion at step {step}, {log} {length:.0f}: "
                    "give --tokenizer of the run, and rollouts of the same run"
                )
            steps[step] = numbers | steps.get(step, {})
    _check(log, steps)

    size = window(completions or completions_per_step(steps))
    counts = {name: sum(name in numbers for numbers in steps.values()) for name in NUMBERS}
    windows = {name: min(size, count // 2) for name, count in counts.items() if count > 1}
    watch = Watch(windows, framework, limit)
    for step in sorted(steps):
        watch.observe(step, steps[step])
    signs = sorted((sign for sign in SIGNS if sign in watch.showing), key=lambda sign: watch.showing[sign])
    verdict, why = judge(watch, signs, {name for name in windows if counts[name] >= 2 * size}, 2 * size)
    ordered = sorted(steps)  # a sign shows at the end of the first window that is bad
    before = [ordered.index(watch.showing[sign]) - windows[sign.numbers[0]] for sign in signs]
    return {
        "log": str(log),
        "framework": framework,
        "steps": [min(steps), max(steps)],
        "means_over": max(windows.values()),
        "limit": limit,
        "verdict": verdict,
        "why": why,
        "sound_until": ordered[min(before)] if signs and min(before) >= 0 else None,
        "numbers": {name: _number(name, watch) for name in NUMBERS if name in windows},
        "signs": [_describe(sign, watch, seen.completions if seen else []) for sign in signs],
        "gtpo": would_gtpo_change_it(seen, applied, watch, signs),
        "not_logged": {name: FRAMEWORKS[framework].to_log.get(name) for name in NUMBERS if name not in windows},
        "calibration": EVIDENCE["calibration"],
    }


def _check(log: Path, steps: Steps) -> None:
    logged = [name for numbers in steps.values() for name in numbers if name in NUMBERS]
    if len(logged) == len(set(logged)):
        raise ValueError(f"{log} has one step, and nothing to compare it with: diagnose the run when it has gone on")
    for step in sorted(steps):
        for name in (name for name in steps[step] if name in NUMBERS and not math.isfinite(steps[step][name])):
            raise ValueError(
                f"{log}: {label(name)} is {steps[step][name]} at step {step}: look at that step's batch, and go on "
                "from a checkpoint before it; to diagnose the steps before, cut the log there"
            )


def judge(watch: Watch, signs: list[Sign], enough: set[str], needed: int) -> tuple[str, str]:
    """The verdict and its reason; `enough` are the numbers with the steps that are `needed` against chance."""
    if not outcomes(enough):
        return "cannot tell", f"a verdict needs {needed} steps of so many completions; what follows may be chance"
    if lost := watch.lost(enough):
        ends = [(label(name), _number(name, watch)) for name in lost]
        return "failed", "; ".join(f"{name} {x['now']:.2f} at the end, best {x['best']:.2f}" for name, x in ends)
    if signs:
        return "degraded", "something goes wrong, but nothing is lost yet"
    outcome_trends = {name: watch.trends[name] for name in outcomes(enough)}
    low = [name for name, trend in outcome_trends.items() if trend.best - trend.floor < watch.margin(name)]
    if low:
        best = ", ".join(f"{label(name)} was never above {outcome_trends[name].best:.2f}" for name in low)
        return "cannot tell", f"nothing got worse, but {best}: too low for a loss to show"
    missing = [] if {"ended", "strict"} & enough else ["how completions end"]
    missing += [] if {"accuracy", "reward"} & enough else ["accuracy or reward"]
    if missing:
        return "cannot tell", f"nothing bad shows, but {' and '.join(missing)} is not known"
    return "healthy", "no sign of a fault"


def _number(name: str, watch: Watch) -> dict[str, Any]:
    trend, more_is_better = watch.trends[name], NUMBERS[name][1]
    best = {} if more_is_better is None else {"best": trend.best if more_is_better else trend.lowest}
    since = min((step for sign, step in watch.showing.items() if sign.numbers[0] == name), default=None)
    return {"start": trend.first, **best, "now": trend.now, "since": since}


def _describe(sign: Sign, watch: Watch, completions: list[dict[str, Any]]) -> dict[str, Any]:
    """A sign, with the three completions of the last steps that show it best."""
    name, tried = sign.numbers[0], ""
    if sign.remedy == "lr" and name in ("ended", "strict"):
        tried = (
            "half the rate kept clean endings in {kept} of {lost} runs that had lost them "
            "(of SmolLM2-135M in {real_kept} of {real_lost}), "
            "a reward for the format and nothing else in {strict_kept} of {strict}"
        ).format(**EVIDENCE["kept"])
    more_is_worse = not NUMBERS[name][1]
    having = [x for x in completions if name in x and (more_is_worse or x[name] != 1)]
    worst = sorted(having, key=lambda x: (x[name] * (-1) ** more_is_worse, -x["step"]))[:3]
    return {
        "number": name,
        "meaning": sign.meaning,
        "since": watch.showing[sign],
        "calibrated": sign.calibrated,
        "try": watch.remedy(sign.remedy),
        "tried": tried,
        "completions": [{"step": x["step"], name: x[name], "text": x["text"]} for x in worst],
    }


def would_gtpo_change_it(seen: "Rollouts | None", applied: bool, watch: Watch, signs: list[Sign]) -> dict[str, Any]:
    """The shares of these rollouts, and what the study found with each model where about as many were in conflict."""
    if seen is None:
        if applied:
            return {"answer": "no", "why": "it is GTPO's own run"}
        return {"answer": "cannot tell", "why": "that needs the run's completions: --rollouts"}
    early = [numbers for step, numbers in seen.steps.items() if step <= EVIDENCE["early"]] or [*seen.steps.values()][:1]
    shares = {name: fmean(x[name] for x in early) for name in ("forward", "backward", "either", "groups")}
    studied = EVIDENCE["shares"]
    least, most = studied[0]["from"], studied[-1]["to"]
    no = {
        "it is GTPO's own run": applied or seen.applied,
        "good and bad completions share no token at their ends": not shares["either"],
        "the reward already sees whether a completion ends": seen.unpunished and fmean(seen.unpunished) < 0.05,
    }
    no_evidence = {
        f"the study measured the share in steps 1 to {EVIDENCE['early']}": min(seen.steps) > EVIDENCE["early"],
        f"the study had {least:.0%} to {most:.0%} of tokens in conflict": not least <= shares["either"] <= most,
    }
    if why := next((why for why, holds in no.items() if holds), ""):
        return {"answer": "no", "why": why + (f"; try {watch.remedy(signs[0].remedy)}" if signs else "")} | shares
    if why := next((why for why, holds in no_evidence.items() if holds), ""):
        return {"answer": "no evidence", "why": why} | shares
    nearest_last = sorted(studied, key=lambda x: -abs(math.log(x["share"] / shares["either"])))
    of_models = {row["model"]: row for row in nearest_last}
    quoted = "; at ".join(map(_effects, of_models.values()))
    return {"answer": "perhaps", "why": f"GTPO − GRPO, conflict at {quoted}"} | shares


def _effects(row: dict[str, Any]) -> str:
    changes = (f"{name} {x[0]:+.2f} [{x[1]:+.2f}, {x[2]:+.2f}]" for name, x in row["effects"].items())
    where = f"{row['pairs']} pairs, {row['task']}, {row['model']}"
    return f"{row['share']:.0%}: {', '.join(changes).replace('-', '−')} ({where})"


# ---------------------------------------------------------------- printing


def screen(report: Mapping[str, Any]) -> str:
    """The report in at most one screen of 80 columns."""
    limit = f", completions of at most {report['limit']:.0f} tokens" if report["limit"] else ""
    lines = [_cut(report["log"]), "{}, steps {} to {}{}".format(report["framework"], *report["steps"], limit), ""]
    over = f"means over {report['means_over']} steps"
    lines += [f"{over:28}{'start':>10}{'best':>10}{'now':>10}   bad since"]
    for name, x in report["numbers"].items():
        best = _short(x["best"]) if "best" in x else ""
        values = f"{_short(x['start']):>10}{best:>10}{_short(x['now']):>10}"
        since = f"   step {x['since']}" if x["since"] else ""
        lines.append(f"{label(name):28}{values}{since}")
    lines += ["", *_wrap(f"{report['verdict'].upper()}: {report['why']}.")]
    signs = report["signs"]
    if report["sound_until"]:
        until = f"Sound until about step {report['sound_until']}, a window of means before the first bad one"
        lines += _wrap(f"{until}: go back to the last checkpoint before it.")
    for number, sign in enumerate(signs, start=1):
        note = "" if sign["calibrated"] else " (uncalibrated)"
        lines += _wrap(f"{number}. since step {sign['since']}: {sign['meaning']}{note}", "   ")
        lines += [_cut(f"   step {x['step']}: {x['text']!r}") for x in sign["completions"] if number <= 2]
        if number == len(signs) or signs[number]["try"] != sign["try"]:
            tried = f": {sign['tried']}" if sign["tried"] else ""
            lines += _wrap(f"   Try a run with {sign['try']}{tried}", "   ")
    gtpo = report["gtpo"]
    lines += ["", *_wrap(f"Would GTPO change it? {gtpo['answer'].capitalize()}: {gtpo['why']}.")]
    if "either" in gtpo:
        masks = "forward mask {forward:.0%}, backward mask {backward:.0%}, either {either:.0%}".format(**gtpo)
        lines += _wrap(f"Tokens in conflict at the start: {masks}; groups with a conflict: {gtpo['groups']:.0%}.")
    missing: dict[str | None, list[str]] = {}
    for name, override in report["not_logged"].items():
        missing.setdefault(override, []).append(label(name))
    for override, names in missing.items():
        lines += _wrap(f"Not logged: {'; '.join(names)}." + (f" To log: {override}" if override else ""))
    calibrated = report["calibration"]
    tasks, models = "; ".join(calibrated["tasks"]), "; ".join(calibrated["models"])
    runs = f"{calibrated['runs']} runs, {calibrated['failed']} of them failed"
    return "\n".join([*lines, *_wrap(f"Calibrated on {runs}. Tasks: {tasks}. Models: {models}. No run on a GPU.")])


def _short(value: float) -> str:
    return (
        f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}" if abs(value) >= 0.001 or not value else f"{value:.0e}"
    )


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2 - 1]} … {text[2 - _WIDTH // 2 :]}"
