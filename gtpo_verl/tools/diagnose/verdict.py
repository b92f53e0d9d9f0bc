"""The report on a run: what was read, the signs that show at its end, and the verdict."""

import math
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from gtpo_verl.monitor.frameworks import FRAMEWORKS, PART, limit_of, translate
from gtpo_verl.monitor.signs import NUMBERS, STEPS, Sign, Watch, label, no_progress, outcomes, window
from gtpo_verl.run_files.links import DOCS
from gtpo_verl.tools.diagnose.evidence import EVIDENCE, would_gtpo_change_it
from gtpo_verl.tools.diagnose.logs import Log, Steps, read_log

if TYPE_CHECKING:
    from gtpo_verl.tools.diagnose.rollout_stats import Rollouts

STATUS = {"healthy": 0, "degraded": 1, "failed": 2, "cannot tell": 3}
_SHARES = ("ended", "cut", "strict")
_THIRDS = ": {:.3g} in the first third of steps and {:.3g} in the last, of which ± {:.2g} is noise"


class Run(NamedTuple):
    """What was read of a run.

    Args:
        log (Log): with our numbers (`signs.NUMBERS`) at each step.
        completions (int | None): of a step; None: unknown.
        limit (float | None): tokens at which completions are cut off; None: unknown.
        seen (Rollouts | None): its completions.
        applied (bool): whether GTPO trained it.
    """

    log: Log
    completions: int | None
    limit: float | None
    seen: "Rollouts | None"
    applied: bool


def read_run(
    path: Path,
    rollouts: Path | None = None,
    tokenizer: str | None = None,
    limit: float | None = None,
    completions: int | None = None,
) -> Run:
    """Read a run's files.

    Args:
        path: what the trainer logged, or a folder of rollouts alone.
        rollouts: a token dump or verl's rollouts.
        tokenizer: of the run, for verl's rollouts.
        limit: tokens at which completions are cut off; None: what the log shows.
        completions: of a step; None: what the log shows.

    Raises:
        ValueError: nothing can be made of these files; the message names the file and a remedy.
    """
    if rollouts is None and path.is_dir() and any(path.glob("gtpo_dump.json")) | any(path.glob("[0-9]*.jsonl")):
        log, seen, applied, rollouts = Log(str(path), "verl", {}, {}, []), None, False, path
    else:
        log, seen = read_log(path), None
        applied = any("gtpo/filter/active" in metrics for metrics in log.steps.values())
        limit = limit or log.config.get("limit")
        limit = limit or limit_of(translate(metrics, log.framework) for metrics in log.steps.values())
        steps = {step: translate(metrics, log.framework, limit) for step, metrics in log.steps.items()}
        log = log._replace(steps={step: x for step, x in steps.items() if x.keys() & NUMBERS.keys()})
        if not log.steps:
            raise ValueError(
                f"{log.name} has none of the metrics of {log.framework} that diagnose reads: {DOCS}/diagnose.md"
            )
    if rollouts is not None:
        from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts

        seen = read_rollouts(rollouts, tokenizer, limit, EVIDENCE["early"])
        _join(log, rollouts, seen.steps)
    logged = [name for numbers in log.steps.values() for name in numbers if name in NUMBERS]
    if len(logged) == len(set(logged)):
        raise ValueError(f"{log.name} has one step, and nothing to compare it with: rerun once it has more steps")
    return Run(log, completions or completions_per_step(log), limit, seen, applied)


def _join(log: Log, rollouts: Path, of_rollouts: Steps) -> None:
    for step, numbers in of_rollouts.items():
        length = log.steps.get(step, {}).get("length", numbers["length"])
        if not 0.8 * length <= numbers["length"] + 1 <= 1.25 * length + 2:
            raise ValueError(
                f"{rollouts} has {numbers['length']:.0f} tokens a completion at step {step}, {log.name} {length:.0f}: "
                "give --tokenizer of the run, and rollouts of the same run"
            )
        log.steps[step] = numbers | log.steps.get(step, {})


def completions_per_step(log: Log) -> int | None:
    """Of how many completions a step's numbers are, as the log shows it.

    They are its tokens over those of a completion with its prompt; or what verl's config says; or at least the smallest
    number of which all shares that are logged are whole multiples, but for their rounding.
    """
    steps = log.steps.values()
    of_tokens = [x["tokens"] / (x["prompt"] + x["length"]) for x in steps if x.keys() >= {"tokens", "prompt", "length"}]
    if of_tokens:
        return round(median(of_tokens))
    if log.config.keys() >= {"prompts", "n"}:
        return log.config["prompts"] * log.config["n"]
    shares = {x[name] for x in steps for name in _SHARES if 0 < x.get(name, 0) < 1}
    fitting = (n for n in range(2, 2001) if all(abs(share * n - round(share * n)) < 1e-4 * n for share in shares))
    return next(fitting, None) if shares else None


def window_of(run: Run, name: str) -> int:
    """Steps over which an outcome is averaged.

    They have 640 completions. Where the log is too short for two windows of so many, or it does not show how many there
    are, as many steps are enough as make the noise of their mean small beside what would be called a loss, or beside
    what changed from the first third of the run to the last.
    """
    steps = [run.log.steps[step] for step in sorted(run.log.steps)]
    of_completions = window(run.completions) if run.completions else math.inf
    values = [x[name] for x in steps if math.isfinite(x.get(name, math.nan))]
    if len(values) >= 2 * of_completions or len(values) < 3:
        return int(min(of_completions, window(1)))
    lowest = min(0, *values, *(x.get("lowest", 0) for x in steps)) if name == "reward" else 0
    third = len(values) // 3
    changed = abs(fmean(values[-third:]) - fmean(values[:third]))
    seen = max(0.1 * (max(values) - lowest if name == "reward" else 1), changed / 2)
    noise = stdev(after - before for before, after in zip(values, values[1:], strict=False)) / math.sqrt(2)
    return int(max(STEPS, min(math.ceil((4 * noise / seen) ** 2) if seen else STEPS, of_completions)))


def report_on(run: Run) -> dict[str, Any]:
    """The report, as `--json` prints it."""
    steps, framework = run.log.steps, run.log.framework
    names = [*NUMBERS, *sorted({name for numbers in steps.values() for name in numbers if name.startswith(PART)})]
    counts = {name: sum(name in numbers for numbers in steps.values()) for name in names}
    sizes = {name: window_of(run, name) for name in outcomes([name for name, count in counts.items() if count])}
    largest = max(sizes.values(), default=window(run.completions or 1))
    windows = {name: min(sizes.get(name, largest), count // 2) for name, count in counts.items() if count > 1}
    watch = Watch(windows, framework, run.limit)
    for step in sorted(steps):
        watch.observe(step, steps[step])
    signs = sorted(watch.showing, key=watch.since)
    enough = {name for name, size in sizes.items() if counts[name] >= 2 * size}
    verdict, why = judge(watch, signs, enough, 2 * min(sizes.values(), default=largest))
    ordered = sorted(steps)  # a sign shows at the end of the first window that is bad
    before = [ordered.index(watch.since(x)) - (1 if x.fails < math.inf else windows[x.numbers[0]]) for x in signs]
    return {
        "log": run.log.name,
        "framework": framework,
        "steps": [ordered[0], ordered[-1]],
        "entries": len(ordered),
        "notes": [*run.log.notes, *_not_finite(watch, signs)],
        "completions": run.completions,
        "means_over": max(windows.values()),
        "limit": run.limit,
        "verdict": verdict,
        "why": why,
        "since": min(map(watch.since, signs), default=None),
        "sound_until": ordered[min(before)] if signs and min(before) >= 0 else None,
        "numbers": {name: _number(name, watch) for name in names if name in windows and watch.trends[name].count},
        "signs": [_describe(sign, watch, run.seen) for sign in signs],
        "gtpo": would_gtpo_change_it(run.seen, run.applied),
        "not_logged": {name: FRAMEWORKS[framework].to_log.get(name) for name in NUMBERS if name not in windows},
        "calibration": EVIDENCE["calibration"],
    }


def judge(watch: Watch, signs: list[Sign], enough: set[str], needed: int) -> tuple[str, str]:
    """The verdict and its reason; `enough` are the numbers with the steps that are `needed` against chance."""
    if broken := [sign for sign in signs if watch.value(sign) > sign.fails]:
        first = min(map(watch.since, broken))
        names = ", ".join(label(sign.numbers[0]) for sign in broken)
        return "failed", f"not finite since step {first}: {names}"
    if lost := watch.lost(enough):
        ends = [(label(name), watch.trends[name]) for name in lost]
        return "failed", "; ".join(f"{name} {x.now:.2f} at the end, best {x.best:.2f}" for name, x in ends)
    if not outcomes(enough):
        return "cannot tell", f"a verdict needs {needed} steps with so much noise; what follows may be chance"
    if signs:
        note = _THIRDS.format(*watch.trends[signs[0].numbers[0]].thirds()) if signs[0].measure is no_progress else ""
        return "degraded", f"{signs[0].meaning}{note}" + ("" if signs[0].throughout else ", and nothing is lost yet")
    outcome_trends = {name: watch.trends[name] for name in outcomes(enough)}
    low = [name for name, trend in outcome_trends.items() if trend.best - trend.floor < trend.margin]
    if low:
        best = ", ".join(f"{label(name)} was never above {outcome_trends[name].best:.2f}" for name in low)
        return "cannot tell", f"nothing got worse, but {best}: too low for a loss to show"
    missing = [] if {"ended", "strict"} & enough or _no_longer(watch) else ["how completions end"]
    missing += [] if {"accuracy", "reward"} & enough else ["accuracy or reward"]
    if missing:
        return "cannot tell", f"nothing bad shows, but {' and '.join(missing)} is not known"
    return "healthy", "no sign of a fault"


def _no_longer(watch: Watch) -> bool:
    """Whether the outcome is better, and completions are no longer than at the start: then many cannot have stopped to
    end."""
    length = watch.trends.get("length")
    name = next(iter(outcomes(watch.trends.keys() - {"ended", "strict"})), "")
    better = name and watch.trends[name].now > watch.trends[name].first + 2 * watch.trends[name].noise
    return bool(better and length and length.known and length.now < 1.2 * length.first)


def _not_finite(watch: Watch, signs: list[Sign]) -> list[str]:
    """Of the numbers that were not finite at some steps, and are again."""
    failing = {sign.numbers[0] for sign in signs if sign.fails < math.inf}
    bad = {label(name): x.bad_steps for name, x in watch.trends.items() if x.bad_steps and name not in failing}
    return [
        f"{name} was not finite in {len(steps)} steps, last in step {steps[-1]}: no failure if the trainer skipped them"
        for name, steps in bad.items()
    ]


def _number(name: str, watch: Watch) -> dict[str, Any]:
    trend, more_is_better = watch.trends[name], NUMBERS[name][1] if name in NUMBERS else True
    best = {} if more_is_better is None else {"best": trend.best if more_is_better else trend.lowest}
    since = min((watch.since(sign) for sign in watch.showing if sign.numbers[0] == name), default=None)
    now = None if trend.broken else trend.now
    return {"start": trend.first, **best, "now": now, "since": since}


def _describe(sign: Sign, watch: Watch, seen: "Rollouts | None") -> dict[str, Any]:
    """A sign, with the three completions of the last steps that show it best."""
    name, tried = sign.numbers[0], ""
    if sign.remedy == "lr" and name in ("ended", "strict"):
        tried = (
            "half the rate kept clean endings in {kept} of {lost} runs that had lost them "
            "(of SmolLM2-135M in {real_kept} of {real_lost}), "
            "a reward for the format and nothing else in {strict_kept} of {strict}"
        ).format(**EVIDENCE["kept"])
    more_is_worse = name in NUMBERS and not NUMBERS[name][1]
    having = [x for x in (seen.completions if seen else ()) if name in x and (more_is_worse or x[name] != 1)]
    worst = sorted(having, key=lambda x: (x[name] * (-1) ** more_is_worse, -x["step"]))[:3]
    return {
        "number": name,
        "meaning": sign.meaning,
        "since": watch.since(sign),
        "calibrated": sign.calibrated,
        "advice": sign.advice,
        "try": watch.remedy(sign.remedy),
        "tried": tried,
        "completions": [{"step": x["step"], name: x[name], "text": seen.text(x)} for x in worst] if seen else [],
    }
