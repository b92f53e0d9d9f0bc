"""What the project's stored runs say of a run with as many tokens in conflict: from `python -m studies.shares`."""

import json
import math
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpo_verl.tools.diagnose.rollout_stats import Rollouts

EVIDENCE = json.loads((files(__package__) / "evidence.json").read_text())
_OWN_RUN = "it is GTPO's own run; where wrong answers are rewarded for their form, set min_correct_reward"


def would_gtpo_change_it(seen: "Rollouts | None", applied: bool) -> dict[str, Any]:
    """The shares of these rollouts, and what the study found with each model where about as many tokens were in
    conflict; `applied` says whether GTPO trained the run."""
    if seen is None:
        if applied:
            return {"answer": "no", "why": _OWN_RUN}
        return {"answer": "cannot tell", "why": "that needs the run's completions: --rollouts"}
    early = [numbers for step, numbers in seen.steps.items() if step <= EVIDENCE["early"]] or [*seen.steps.values()][:1]
    names = [name for name in ("forward", "backward", "either", "groups") if name in early[0]]
    shares = {name: fmean(x[name] for x in early) for name in names}
    studied = EVIDENCE["shares"]
    least, most = studied[0]["from"], studied[-1]["to"]
    punished = seen.unpunished and fmean(seen.unpunished) < 0.05
    late, outside = min(seen.steps) > EVIDENCE["early"], not least <= shares["either"] <= most
    for holds, answer, why in (
        (applied or seen.applied, "no", _OWN_RUN),
        (not shares["either"], "no", "good and bad completions share no token at their ends"),
        (punished, "no", "the reward already sees whether a completion ends"),
        (late, "no evidence", f"the study measured the share in steps 1 to {EVIDENCE['early']}"),
        (outside, "no evidence", f"the study had {least:.0%} to {most:.0%} of tokens in conflict"),
    ):
        if holds:
            return {"answer": answer, "why": why} | shares
    nearest_last = sorted(studied, key=lambda x: -abs(math.log(x["share"] / shares["either"])))
    of_models = {row["model"]: row for row in nearest_last}
    quoted = "; at ".join(map(_effects, of_models.values()))
    return {"answer": "perhaps", "why": f"GTPO − GRPO, conflict at {quoted}"} | shares


def _effects(row: dict[str, Any]) -> str:
    changes = (f"{name} {x[0]:+.2f} [{x[1]:+.2f}, {x[2]:+.2f}]" for name, x in row["effects"].items())
    where = f"{row['pairs']} pairs, {row['task']}, {row['model']}"
    return f"{row['share']:.0%}: {', '.join(changes).replace('-', '−')} ({where})"
