"""pass@k and maj@k of the paper (GTPO, arXiv:2508.03772, Sec. 6.1, Table 1) from verl's validation dumps.

A dump is what verl writes under ``trainer.validation_data_dir``: one ``<step>.jsonl`` per validation, one line per
completion with ``input``, ``output``, ``gts``, ``score``, ``step``, every value the reward function returned (``acc``,
``pred``, ...), and, from the V1 trainer, ``uid``. Sample it with ``val_kwargs.n=64 val_kwargs.do_sample=True``.

    gtpo-verl evaluate Qwen/MATH/GRPO=grpo/500.jsonl Qwen/MATH/GTPO=gtpo/500.jsonl --out results

Each figure is given twice, in percent of the questions:

- *unbiased*: its mean over all k-subsets of a question's n completions. For pass@k this is Chen et al.'s estimator
  1 − C(n−c, k)/C(n, k) (arXiv:2107.03374); for maj@k the same mean, exact as well, see :func:`majority_at_k`.
- *one draw*: its value on the first k completions. Nearly every cell of the paper's Table 1 is a multiple of 1/30
  (AIME) or 1/40 (AMC), so the paper seems to have drawn once; compare these figures with it.

The interval is a 95% percentile bootstrap over questions of the unbiased figure. A k larger than the number of
completions is left out, and stderr says so. A dump that lacks completions is an error.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from gtpo_verl.paper.table1 import (
    DEFAULT_K,
    RESAMPLES,
    SEED,
    Label,
    Record,
    as_csv,
    as_latex,
    as_markdown,
    evaluate,
    table,
)
from gtpo_verl.paper.validation_dumps import Question, benchmark_name, read_dump


def parse_dump_argument(argument: str) -> tuple[Label, str, Path]:
    """``MODEL/TRAINING SET/METHOD[/DATA SET]=DUMP``, ``METHOD=DUMP`` or ``DUMP`` as (label, data set or "", path).

    Raises:
        ValueError: If the label has another number of parts.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).exists():
        return Label("", "", Path(argument).stem), "", Path(argument)
    parts = [part.strip() for part in name.split("/")]
    if len(parts) == 1:
        return Label("", "", parts[0]), "", Path(path)
    if len(parts) not in (3, 4):
        raise ValueError(
            f"label {name!r}: write METHOD, MODEL/TRAINING SET/METHOD or MODEL/TRAINING SET/METHOD/DATA SET"
        )
    return Label(*parts[:3]), parts[3] if len(parts) == 4 else "", Path(path)


def evaluate_dumps(
    arguments: Iterable[str],
    ks: Sequence[int] = DEFAULT_K,
    seed: int = SEED,
    resamples: int = RESAMPLES,
    samples: int | None = None,
) -> list[Record]:
    """Records of all dumps, in the order given; see :func:`parse_dump_argument` and :func:`read_dump`.

    Raises:
        ValueError: If a dump names its data sets and its label another one, or two dumps of one label and data set
            share a question, or a question has another number of completions than ``samples``.
    """
    questions: dict[tuple[Label, str], list[Question]] = {}
    for argument in arguments:
        label, named, path = parse_dump_argument(argument)
        for source, found in read_dump(path).items():
            data_set = benchmark_name(named or source)
            if named and source and benchmark_name(source) != data_set:
                raise ValueError(f"{path} has rows of {source!r}: drop the data set {named!r} from its label")
            if short := [q for q in found if samples is not None and len(q.correct) != samples]:
                raise ValueError(
                    f"{path}: {len(short)} of {len(found)} questions do not have --samples {samples} completions "
                    f"({len(short[0].correct)} for {short[0].name[-60:]!r}): completions are lost, sample them again"
                )
            held = questions.setdefault((label, data_set), [])
            if again := {q.name for q in held} & {q.name for q in found}:
                raise ValueError(
                    f"{path} repeats {len(again)} questions of an earlier dump labelled {label.method!r} "
                    f"(such as {min(again)[-60:]!r}): give each run and step its own label"
                )
            held += found
    return [
        record
        for (label, data_set), held in questions.items()
        for record in evaluate(label, data_set, held, ks, seed, resamples)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gtpo-verl evaluate``."""
    parser.description = "Compute pass@k and maj@k from verl's validation dumps, in the layout of the paper's Table 1."
    parser.epilog = (
        "example: gtpo-verl evaluate Qwen/MATH/GRPO=grpo/500.jsonl Qwen/MATH/GTPO=gtpo/500.jsonl --out results\n\n"
        "bash recipes/evaluate.sh CHECKPOINT samples the completions."
    )
    parser.add_argument(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help="<step>.jsonl under trainer.validation_data_dir, or LABEL=DUMP, LABEL being "
        '"METHOD", "MODEL/TRAINING SET/METHOD" or "MODEL/TRAINING SET/METHOD/DATA SET"',
    )
    parser.add_argument("--k", nargs="+", type=int, default=list(DEFAULT_K), help="default: 1 4 8 16 32 64")
    parser.add_argument(
        "--samples", type=int, help="completions that every question must have (default: the same number)"
    )
    parser.add_argument("--format", choices=["md", "csv", "latex"], default="md")
    parser.add_argument("--out", type=Path, help="folder for the table and evaluation.json, which has every figure")
    parser.add_argument("--seed", type=int, default=SEED, help="of the bootstrap over questions")


def run(args: argparse.Namespace) -> int:
    """Print the table, and write it with all figures into ``--out``."""
    if min(args.k) < 1:
        raise ValueError(f"--k must be at least 1, got {min(args.k)}")
    records = evaluate_dumps(args.dumps, args.k, args.seed, samples=args.samples)
    if not records:
        raise ValueError("no k is left to report: no question has that many completions")
    write, suffix = {"md": (as_markdown, "md"), "csv": (as_csv, "csv"), "latex": (as_latex, "tex")}[args.format]
    rendered = write(table(records))
    print(rendered, end="")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"table.{suffix}").write_text(rendered, encoding="utf-8")
        document = {"seed": args.seed, "resamples": RESAMPLES, "records": [asdict(record) for record in records]}
        (args.out / "evaluation.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0
