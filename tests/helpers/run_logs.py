"""Logs of runs, in the forms in which trainers leave them."""

import csv
import json
import random

WIDTH = 1024


def verl(steps=120, completions=512, noise=0.02, **curves):
    """verl's metrics at each step of a sound run, but for the `curves`: functions of the step by a short name."""
    sound = {
        "score": lambda step: min(0.3 + 0.005 * step, 0.62),
        "entropy": lambda step: 0.45,
        "length": lambda step: 300.0,
        "cut": lambda step: 0.01,
        "grad_norm": lambda step: 0.2,
        "kl": lambda step: 0.001,
    }
    drawn = random.Random(1)
    for step in range(1, steps + 1):
        x = {name: curve(step) for name, curve in (sound | curves).items()}
        yield {
            "training/global_step": step,
            "actor/entropy": x["entropy"],
            "actor/pg_loss": drawn.gauss(0, 0.01) if x["grad_norm"] == x["grad_norm"] else x["grad_norm"],
            "actor/kl_loss": x["kl"],
            "actor/grad_norm": x["grad_norm"],
            "actor/lr": 1e-6,
            "critic/score/mean": x["score"] + (drawn.gauss(0, noise) if x["score"] else 0.0),
            "critic/score/min": x.get("lowest", 0.0),
            "critic/score/max": 1.0 if x["score"] else 0.0,
            "response_length/mean": x["length"],
            "response_length/max": float(WIDTH) if x["cut"] else 700.0,
            "response_length/clip_ratio": x["cut"],
            "prompt_length/mean": 110.0,
            "perf/total_num_tokens": completions * (110.0 + x["length"]),
        }


def collapse(cut=0.97, **curves):
    """verl's metrics of a run that breaks at step 72."""
    broken = {
        "score": lambda step: min(0.3 + 0.005 * step, 0.62) if step < 72 else 0.01,
        "entropy": lambda step: 0.45 if step < 72 else 6.0,
        "cut": lambda step: (0.01 if cut else 0.0) if step < 72 else cut,
    }
    return verl(**broken | curves)


def trl(records):
    """The same as TRL calls it."""
    names = {
        "reward": "critic/score/mean",
        "entropy": "actor/entropy",
        "grad_norm": "actor/grad_norm",
        "loss": "actor/pg_loss",
        "kl": "actor/kl_loss",
        "learning_rate": "actor/lr",
        "completions/mean_length": "response_length/mean",
        "completions/max_length": "response_length/max",
        "completions/clipped_ratio": "response_length/clip_ratio",
    }
    for record in records:
        yield {"frac_reward_zero_std": 0.3} | {ours: record[theirs] for ours, theirs in names.items()}


def write_console(path, records, config=True, encoding="utf-8"):
    """verl's console, as `tee` saves it."""
    worker = "\x1b[36m(TaskRunner pid=11)\x1b[0m"
    lines = [f"{worker} {{'data': {{'max_response_length': {WIDTH}, 'train_batch_size': 64}}, "] * config
    lines += [f"{worker}  'rollout': {{'mode': 'async', 'n': 8}}}}"] * config
    for record in records:
        numbers = " - ".join(f"{k}:np.float64({v})" if "pg_" in k else f"{k}:{v}" for k, v in record.items())
        step = record["training/global_step"]
        lines += [
            f"{worker} step:{step} - {numbers}",
            f"Training Progress:  {step}%|███ | {step}/120 [01:00<02:00, 9s/it]",
        ]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def write_jsonl(path, records):
    """verl's file logger, which writes null for NaN."""
    null = [{k: v if v == v else None for k, v in record.items()} for record in records]
    lines = [json.dumps({"step": record["training/global_step"], "data": record}) for record in null]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_state(path, records, every=1):
    """TRL's `trainer_state.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    history = [{"step": every * number, **record} for number, record in enumerate(records, start=1)]
    path.write_text(json.dumps({"log_history": history, "global_step": len(history)}, indent=2))
    return path


def write_printed(path, records, quoted=False, bar=True):
    """What TRL prints, between progress bars."""
    records = [{k: str(v) for k, v in record.items()} if quoted else record for record in records]
    bars = [f"  1%|#   | {n}/120 [01:00<09:00, 6.1s/it]      " * bar for n in range(1, len(records) + 1)]
    path.write_text("".join(f"{bar}{record}\n" for bar, record in zip(bars, records, strict=True)))
    return path


def write_swift(path, records):
    """ms-swift's `logging.jsonl`."""
    lines = [json.dumps(x | {"global_step/max_steps": f"{n}/500"}) for n, x in enumerate(records, start=1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_csv(path, records, chart=None):
    """W&B's history, or the export of the `chart` of a metric."""
    with path.open("w", newline="") as file:
        if chart:
            rows = csv.writer(file)
            rows.writerow(["Step", f"a-run - {chart}", f"a-run - {chart}__MIN", f"a-run - {chart}__MAX"])
            rows.writerows([x["training/global_step"], *[x[chart]] * 3] for x in records)
        else:
            records = [{"_step": x["training/global_step"], "_runtime": 1, "empty": "", **x} for x in records]
            rows = csv.DictWriter(file, records[0])
            rows.writeheader()
            rows.writerows(records)
    return path
