"""The report on a run: what was read, the signs that show at its end, and the verdict."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from gtpo_verl.monitor import signs as rules
from gtpo_verl.monitor.frameworks import FRAMEWORKS, PART, limit_of, translate, validation_results
from gtpo_verl.monitor.signs import NUMBERS, Sign, Watch, label
from gtpo_verl.run_files.dumps import HEADER_NAME
from gtpo_verl.run_files.links import DOCS
from gtpo_verl.tools.diagnose.logs import Log, read_log

if TYPE_CHECKING:
    from gtpo_verl.tools.diagnose.rollout_stats import Rollouts

STATUS = {"healthy": 0, "degraded": 1, "failed": 2, "cannot tell": 3}
_SHARES = ("terminated", "cut", "exact_format")


class Run(NamedTuple):
    """What was read of a run: its log with our numbers (`signs.NUMBERS`) at each step; how many completions a step has
    and the tokens at which they are cut off, None if unknown; and its completions."""

    log: Log
    completions: int | None
    limit: float | None
    seen: "Rollouts | None"


def read_run(
    path: Path,
    rollouts: Path | None = None,
    tokenizer: str | None = None,
    limit: float | None = None,
    completions: int | None = None,
) -> Run:
    """Read what the trainer logged, or a folder of rollouts alone, and `rollouts` with the run's `tokenizer`. The
    tokens that `limit` a completion, and the `completions` of a step, are else what the log shows. A ValueError names
    the file of which nothing can be made, and a remedy."""
    if rollouts is None and path.is_dir() and ((path / HEADER_NAME).exists() or any(path.glob("[0-9]*.jsonl"))):
        log, seen, rollouts = Log(str(path), "verl", {}, {}, []), None, path
    else:
        log, seen = _same_validation(read_log(path)), None
        limit = limit or log.config.get("limit") or limit_of(translate(x, log.framework) for x in log.steps.values())
        steps = {step: translate(metrics, log.framework, limit) for step, metrics in log.steps.items()}
        log = log._replace(steps={step: x for step, x in steps.items() if x.keys() & NUMBERS.keys()})
        known = set[str]().union(*log.steps.values())
        if not known:
            raise ValueError(f"{log.name} has no metrics of {log.framework} that diagnose reads: {DOCS}/diagnose.md")
        if known <= {"loss", "grad_norm", "lr", "entropy"}:
            raise ValueError(
                f"{log.name} has no reward that diagnose reads; if it is of supervised training, give an RL run"
            )
    if rollouts is not None:
        from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts

        seen = read_rollouts(rollouts, tokenizer, limit, max(log.steps, default=math.inf))
        if seen.left_out:
            log.notes.append(f"{seen.left_out} steps of {rollouts} are left out: they are after the log's last")
        for step, numbers in seen.steps.items():
            length = log.steps.get(step, {}).get("length", numbers["length"])
            # A dump counts a completion's own tokens, of some groups; a log may count an agent's tools.
            if seen.is_text and not 0.8 * length <= numbers["length"] + 1 <= 1.25 * length + 2:
                found = f"{numbers['length']:.0f} tokens a completion at step {step}, {log.name} {length:.0f}"
                raise ValueError(f"{rollouts} has {found}: give --tokenizer of the run, and rollouts of the same run")
            log.steps[step] = numbers | log.steps.get(step, {})
    logged = [name for numbers in log.steps.values() for name in numbers if name in NUMBERS]
    if len(logged) == len(set(logged)):
        raise ValueError(f"{log.name} has one step, and nothing to compare it with: rerun once it has more steps")
    return Run(log, completions or completions_per_step(log), limit, seen)


def _same_validation(log: Log) -> Log:
    """Return a log without results that only some validations have, of a set that was added, say: their mean jumps."""
    found = [{*results} for x in log.steps.values() if (results := validation_results(x, log.framework))]
    kept = set.intersection(*found) if found else set()
    if not (kept and (left := set.union(*found) - kept)):
        return log
    note = f"left out, since not every validation has it: {', '.join(sorted(left))}"
    steps = {step: {name: x[name] for name in x.keys() - left} for step, x in log.steps.items()}
    return log._replace(steps=steps, notes=[*log.notes, note])


def completions_per_step(log: Log) -> int | None:
    """Return of how many completions a step's numbers are: its tokens over those of a completion with its prompt, or
    what verl's config says, or the smallest number that makes all logged shares whole, but for rounding."""
    needed = ("tokens", "prompt", "length")
    steps = [x for x in log.steps.values() if all(math.isfinite(x.get(name, 0)) for name in (*needed, *_SHARES))]
    of_tokens = [x["tokens"] / max(x["prompt"] + x["length"], 1) for x in steps if x.keys() >= {*needed}]
    if of_tokens and median(of_tokens) >= 1:
        return round(median(of_tokens))
    if log.config.keys() >= {"prompts", "n"}:
        return log.config["prompts"] * log.config["n"]
    shares = {x[name] for x in steps[:1000] for name in _SHARES if 0 < x.get(name, 0) < 1}
    fitting = (n for n in range(2, 2001) if all(abs(share * n - round(share * n)) < 1e-4 * n for share in shares))
    return next(fitting, None) if shares else None


def window_of(run: Run, name: str) -> int:
    """Return the steps over which an outcome is averaged: those of 640 completions or, where two such windows do not
    fit or nobody knows, as many as make the noise of a mean small compared with a loss or with the run's own change."""
    if name == "validation":
        return rules.VALIDATIONS
    steps = [run.log.steps[step] for step in sorted(run.log.steps)]
    of_completions = rules.window(run.completions) if run.completions else math.inf
    values = [x[name] for x in steps if math.isfinite(x.get(name, math.nan))]
    if len(values) >= 2 * of_completions or len(values) < 3:
        return int(min(of_completions, rules.window(1)))
    lowest = min(0, *values, median(x.get("lowest", 0) for x in steps)) if name == "reward" else 0
    third = len(values) // 3
    changed = abs(fmean(values[-third:]) - fmean(values[:third]))
    seen = max(0.1 * (max(values) - lowest if name == "reward" else 1), changed / 2)
    noise = stdev(after - before for before, after in pairwise(values)) / math.sqrt(2)
    return int(max(rules.STEPS, min(math.ceil((4 * noise / seen) ** 2) if seen else rules.STEPS, of_completions)))


def report_on(run: Run) -> dict[str, Any]:
    """Return the report, as `--json` prints it."""
    steps, framework, ordered = run.log.steps, run.log.framework, sorted(run.log.steps)
    names = [*NUMBERS, *sorted({name for numbers in steps.values() for name in numbers if name.startswith(PART)})]
    counts = {name: sum(name in numbers for numbers in steps.values()) for name in names}
    sizes = {name: window_of(run, name) for name in rules.OUTCOMES if counts[name]}
    trained = [size for name, size in sizes.items() if name != "validation"]
    largest = max(trained, default=rules.window(run.completions or 1))
    windows = {name: min(sizes.get(name, largest), count // 2) for name, count in counts.items() if count > 1}
    watch = Watch(windows, framework, run.limit)
    for step in ordered:
        watch.observe(step, steps[step])
    signs, notes = _sorted(watch)
    verdict, why = judge(watch, signs, max(counts.values()))
    return {
        "log": run.log.name,
        "framework": framework,
        "steps": [ordered[0], ordered[-1]],
        "entries": len(ordered),
        "notes": [*run.log.notes, *_not_finite(watch)],
        "completions": run.completions,
        "means_over": max(windows.values()),
        "limit": run.limit,
        "outcome": watch.decides() or None,
        "verdict": verdict,
        "why": why,
        "since": watch.showing[signs[0]] if signs else None,
        "numbers": {name: _number(name, watch, signs) for name in windows if watch[name].count >= watch[name].window},
        "signs": [_describe(sign, watch, run.seen) for sign in signs],
        "beside": [f"since step {watch.showing[sign]}: {watch.sentence(sign)}" for sign in notes],
        "shared_tokens": run.seen.shares() if run.seen else None,
        "not_logged": {name: FRAMEWORKS[framework].to_log.get(name) for name in NUMBERS if name not in windows},
    }


def _sorted(watch: Watch) -> tuple[list[Sign], list[Sign]]:
    """Return the faults, the gravest of each number, in the order in which they came about; and the notes."""
    gravest: dict[str, Sign] = {}
    showing = filter(watch.showing.__contains__, watch.signs)
    for sign in sorted(showing, key=lambda x: (-watch.level(x), watch.showing[x])):
        gravest.setdefault(sign.number, sign)
    signs = sorted(gravest.values(), key=lambda x: (watch.showing[x], -watch.level(x)))
    return [x for x in signs if watch.level(x) != rules.NOTE], [x for x in signs if watch.level(x) == rules.NOTE]


def judge(watch: Watch, signs: list[Sign], entries: int) -> tuple[str, str]:
    """Return the verdict and its reason: what is so in every step and what is not finite need no statistics."""
    name = watch.decides()
    outcome = watch[name]
    now = f"{label(name)} {outcome.now:.2f} at the end, {outcome.first:.2f} at first, best {outcome.best:.2f}"
    failed = [sign for sign in signs if watch.level(sign) == rules.FAILED]
    if broken := [sign for sign in failed if sign in rules.BROKEN]:
        return "failed", f"not finite: {', '.join(label(sign.number) for sign in broken)}"
    always = [sign for sign in signs if sign.from_start and sign.level == rules.FAULT]
    is_short = entries < 2 * rules.STEPS and (name, outcome.window) != ("validation", rules.VALIDATIONS)
    if is_short and not always:
        return "cannot tell", f"at least {2 * rules.STEPS} steps are needed, {entries} are logged; signs may be noise"
    if failed:
        ends = [(label(sign.number), watch[sign.number]) for sign in failed]
        return "failed", "; ".join(f"{name} {x.now:.2f} at the end, best {x.best:.2f}" for name, x in ends)
    if signs:
        return "degraded", f"{(always or signs)[0].meaning}" + (f"; {now}" if outcome.known else "")
    if not name:
        return "cannot tell", "no validation, accuracy or reward is logged"
    if not outcome.rose():
        few = f"{outcome.count} validations show neither a rise nor a loss beyond noise"
        why, more = (few, "of them") if name == "validation" else ("nothing learned yet", "steps")
        return "cannot tell", f"{why}: {now}; rerun with more {more}"
    return "healthy", now


def _not_finite(watch: Watch) -> list[str]:
    """Of the numbers that were not finite at some steps, and are again."""
    said = "{} was not finite in {} steps, last in step {}: no failure if the trainer skipped them"
    bad_steps = {name: x.bad_steps for name, x in watch.trends.items() if x.bad_steps and not x.broken}
    return [said.format(label(name), len(steps), steps[-1]) for name, steps in bad_steps.items()]


def _number(name: str, watch: Watch, signs: list[Sign]) -> dict[str, Any]:
    trend = watch[name]
    best = {} if (value := watch.best(name)) is None else {"best": value}
    since = next((watch.showing[sign] for sign in signs if sign.number == name), None)
    return {"start": trend.first, **best, "now": None if trend.broken else trend.now, "since": since}


def _describe(sign: Sign, watch: Watch, seen: "Rollouts | None") -> dict[str, Any]:
    """Return a sign, with the three completions of the last steps that show it best."""
    name = sign.number
    order = -1 if name in NUMBERS and not NUMBERS[name][1] else 1  # the largest first where more is worse
    having = [x for x in (seen.completions if seen else ()) if name in x and (order < 0 or x[name] != 1)]
    worst = sorted(having, key=lambda x: (order * x[name], -x["step"]))[:3]
    return {
        "number": name,
        "meaning": sign.meaning,
        "since": watch.showing[sign],
        "calibrated": sign.calibrated,
        "advice": watch.advice(sign),
        "try": watch.remedy(sign),
        "completions": [{"step": x["step"], name: x[name], "text": x["text"]} for x in worst],
    }
