"""pass@k and maj@k against brute force, verl's dumps as they are written, and the paper's figures beside ours."""

import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from verl.trainer.ppo.v1 import PPOTrainer

from gtpo_verl.reward.score import compute_score
from recipes.__main__ import main
from recipes.paper import evaluation
from recipes.paper.evaluation import (
    RIGHT,
    UNPARSED,
    Label,
    Question,
    evaluate,
    evaluate_dumps,
    majority_at_k,
    number_answers,
    parse_dump_argument,
    pass_at_k,
    read_dump,
)

GTPO = Label("Qwen", "GSM8K", "GTPO")


def question(correct: str, preds: str | None = None, name: str = "q") -> Question:
    """ "1101" as four completions, right where 1; `preds` one letter each, space for an unparsed one."""
    ok = tuple(c == "1" for c in correct)
    votes = None if preds is None else number_answers(["" if p == " " else p for p in preds], ok)
    return Question(name, ok, votes)


def dump_row(
    uid: str | None, acc: float, pred: str | None = "42", prompt: str = "What is 40+2?", **more: object
) -> dict:
    row = {"input": f"system\nuser\n{prompt}\nassistant\n", "output": "…", "gts": "42", "score": 10.0 * acc + 10.0}
    return row | {"step": 500, "acc": acc, "pred": pred} | ({} if uid is None else {"uid": uid}) | more


def write_dump(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_all_k_subsets(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def majority(votes):
    """1 if `RIGHT` leads alone, 1/t if it shares the lead with t - 1 others, else 0."""
    counts = Counter(votes)
    most = max(counts.values())
    return (counts[RIGHT] == most) / sum(count == most for count in counts.values())


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=9), st.data())
@example([RIGHT] * 4 + [1] * 4 + [2] * 3 + [3, 4, UNPARSED], None)
def test_majority_at_k_is_the_mean_over_all_k_subsets(votes, data):
    k = data.draw(st.integers(1, len(votes))) if data else 7
    subsets = list(itertools.combinations(votes, k))
    brute = sum(map(majority, subsets)) / len(subsets)
    assert majority_at_k(votes, k) == pytest.approx(brute, abs=1e-12)


def test_estimators_stay_finite_at_thousands_of_completions():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)
    assert majority_at_k([RIGHT] * 1000 + [1] * 1000, 500) == pytest.approx(0.5)
    assert majority_at_k([RIGHT] * 60 + [1] + [2] * 3, 8) <= 1


@pytest.mark.parametrize(
    "votes, expected",
    [
        ([RIGHT, RIGHT, 1], 1.0),
        ([RIGHT, 1, 1], 0.0),
        ([RIGHT, 1, 2], 1 / 3),
        ([RIGHT, RIGHT, 1, 1, 2], 1 / 2),
        ([RIGHT, UNPARSED], 1 / 2),
        ([UNPARSED], 0.0),
    ],
)
def test_a_tie_counts_one_over_the_number_tied(votes, expected):
    assert majority(votes) == expected == majority_at_k(votes, len(votes))


def test_every_accepted_answer_is_one_answer_whatever_its_spelling_and_an_unparsed_one_is_never_right():
    # "half" is accepted by the grader only; the third completion spells it and fails for its format.
    answers, ok = ["0.5", "half", "half", "7", "", ""], [True, True, False, False, False, True]
    assert number_answers(answers, ok) == (RIGHT, RIGHT, RIGHT, 1, UNPARSED, UNPARSED)


@pytest.mark.parametrize(
    "rows, questions",
    [
        (  # V1: grouped by uid, in the order of their sessions
            [
                dump_row("a-1_10_0", 1.0),
                dump_row("b-2_0_0", 1.0),
                dump_row("a-1_2_0", 0.0, "7"),
                dump_row("a-1_0_0", 0.0, "6"),
            ],
            [((False, False, True), (1, 2, RIGHT)), ((True,), (RIGHT,))],
        ),
        (  # of a session the last output
            [dump_row("a_0_1", 1.0), dump_row("a_0_0", 0.0, ""), dump_row("a_1_0", 0.0, "1")],
            [((True, False), (RIGHT, 1))],
        ),
        (  # without uid: grouped by input
            [dump_row(None, acc, "1", prompt=p) for p, acc in [("p", 1.0), ("q", 0.0), ("p", 0.0), ("q", 0.0)]],
            [((True, False), (RIGHT, RIGHT)), ((False, False), (1, 1))],
        ),
        (  # answers that the reward did not find
            [dump_row("a_0_0", 0.0, None), dump_row("a_1_0", 0.0, ""), dump_row("a_2_0", 0.0, "7")],
            [((False, False, False), (UNPARSED, UNPARSED, 1))],
        ),
        ([dump_row("a_0_0", 1.0, output="one\u2028two\x85three\rfour")], [((True,), (RIGHT,))]),
        # a score of 0 or 1 stands in for acc
        ([{"input": "p", "output": "…", "gts": "1", "score": s, "step": 0} for s in (1, 0.0)], [((True, False), None)]),
    ],
    ids=["uid", "outputs", "input", "unparsed", "line separators", "score"],
)
def test_the_rows_of_a_dump_become_questions(tmp_path, rows, questions):
    (found,) = read_dump(write_dump(tmp_path / "1.jsonl", rows)).values()
    assert [(question.correct, question.votes) for question in found] == questions


def test_a_dump_of_two_data_sources_is_two_data_sets(tmp_path):
    rows = [dump_row("a_0_0", 0.0, data_source="math"), dump_row("b_0_0", 1.0, data_source="gsm8k")]
    data_sets = read_dump(write_dump(tmp_path / "1.jsonl", rows))
    assert {name: found[0].correct for name, found in data_sets.items()} == {"math": (False,), "gsm8k": (True,)}


def test_comparisons_that_timed_out_are_counted(tmp_path, capsys):
    rows = [dump_row(f"a_{s}_0", 0.0, "7", timeout=float(s < 2)) for s in range(3)]
    read_dump(write_dump(tmp_path / "1.jsonl", rows))
    assert f"{tmp_path / '1.jsonl'}: 2 completions " in capsys.readouterr().err


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"input": "p", "output": "", "score": 11.0}], r":1 is not .*score is 11\.0"),
        ([dump_row("a_0_0", 1.0, "1"), dump_row("a_1_0", 0.5, "1")], r":2 is not .* \(acc is 0.5"),
        ([dump_row("a_0_0", 1.0, "1"), dump_row("a_1_0", 0, "1") | {"acc": None}], r":2 is not .* \(acc is None"),
        ([{"step": 1, "data": {}}], ":1 is not .*score is None"),
        ([], " holds no line"),
    ],
    ids=["score", "acc", "no acc", "another file", "empty"],
)
def test_a_dump_that_does_not_say_what_is_right_is_refused(tmp_path, rows, message):
    dump = write_dump(tmp_path / "1.jsonl", rows)
    with pytest.raises(ValueError, match=f"{dump}{message}"):
        read_dump(dump)


def test_a_folder_of_dumps_is_refused_by_naming_what_is_in_it(tmp_path):
    write_dump(tmp_path / "20.jsonl", [])
    with pytest.raises(ValueError, match=rf"{tmp_path} is a folder \(20\.jsonl\)"):
        read_dump(tmp_path)


def test_a_dump_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"No such file: .*{tmp_path}/nope\.jsonl"):
        read_dump(tmp_path / "nope.jsonl")


def test_a_dump_of_this_packages_reward_written_by_verl_itself_is_read(tmp_path):
    asked = [("p", "1,000", "1000"), ("p", "1000.0", "1000"), ("q", "7", "1/2"), ("q", "0.5", "1/2")]
    outputs = [f"<reasoning>…</reasoning><answer>{answer}</answer>" for _, answer, _ in asked]
    gts = [gold for _, _, gold in asked]
    scores = [compute_score("AIME2024", *row) for row in zip(outputs, gts, strict=True)]
    PPOTrainer._write_generations(
        inputs=[prompt for prompt, _, _ in asked],
        outputs=outputs,
        gts=gts,
        scores=[score["score"] for score in scores],
        reward_extra_infos_dict={key: [np.array(score[key])[()] for score in scores] for key in scores[0]}
        | {"data_source": ["AIME2024"] * 4, "uid": ["0b5e-11_0_0", "0b5e-11_1_0", "9c1f-22_0_0", "9c1f-22_1_0"]},
        dump_path=str(tmp_path),
        global_steps=500,
    )
    records = evaluate_dumps([f"Qwen/GSM8K/GTPO={tmp_path / '500.jsonl'}"], ks=[1, 2])
    figures = {(r.data_set, r.metric, r.k): (round(r.estimate, 9), r.draw) for r in records}
    assert figures == {
        ("AIME2024", "pass", 1): (75.0, 50.0),
        ("AIME2024", "pass", 2): (100.0, 100.0),
        ("AIME2024", "maj", 2): (75.0, 75.0),
    }


def test_the_two_figures_of_a_data_set_are_the_mean_over_all_subsets_and_the_first_k():
    questions = [question("0011", "ab42"), question("1000", "4 cc")]
    figures = {(r.metric, r.k): r for r in evaluate(GTPO, "AIME2024", questions, ks=[1, 2, 4])}
    assert set(figures) == {("pass", 1), ("pass", 2), ("pass", 4), ("maj", 2), ("maj", 4)}
    assert figures["pass", 2].draw == 50.0
    assert figures["pass", 2].estimate == pytest.approx(100 * ((1 - 1 / 6) + 1 / 2) / 2)
    assert figures["pass", 1].estimate == pytest.approx(100 * (1 / 2 + 1 / 4) / 2)
    # "4" and "2" are both accepted, so they are one answer with two votes of four; in the other question "c" has two.
    assert figures["maj", 4].draw == pytest.approx(100 * (1 + 0) / 2)
    assert figures["maj", 4].estimate == pytest.approx(figures["maj", 4].draw)


def test_the_interval_has_the_width_of_a_mean_over_questions_whatever_the_other_ks():
    questions = [question("10"), question("00")] * 50
    alone, among = (evaluate(GTPO, "", questions, ks=ks)[0] for ks in ([1], [2, 1]))
    assert alone == among
    assert alone.high - alone.low == pytest.approx(2 * 100 * 1.96 * math.sqrt(0.25 / 4 / 100), rel=0.1)
    assert alone.low < alone.estimate < alone.high


def test_a_question_that_lacks_completions_is_an_error():
    questions = [question("1011"), question("100", name="short one"), question("1000")]
    with pytest.raises(ValueError, match=r"^.*1 of 3 questions .* 4 completions \(3 for 'short one'\): .*lost"):
        evaluate(GTPO, "AMC2023", questions)


@pytest.mark.parametrize(
    ("samples", "status", "message"),
    [
        ("3", 0, "^$"),
        ("4", 2, r"2 of 2 questions .* 4 completions \(3 for "),
        ("2", 2, r"2 of 2 questions .* 2 completions \(3 for .*--samples 3"),
    ],
)
def test_the_number_of_completions_that_is_given_is_that_of_each_question(tmp_path, capsys, samples, status, message):
    rows = [dump_row(f"{q}_{s}_0", 1.0, "42", prompt=q) for q in "ab" for s in range(3)]
    dump = write_dump(tmp_path / "1.jsonl", rows)
    assert main(["evaluate", str(dump), "--k", "1", "--samples", samples]) == status
    assert re.search(message, capsys.readouterr().err)


def test_a_k_beyond_the_completions_is_left_out_with_a_message(capsys):
    records = evaluate(GTPO, "AMC2023", [question("101"), question("100")], ks=[1, 4])
    assert [(r.k, r.completions) for r in records] == [(1, 3)]
    err = capsys.readouterr().err
    assert "k = [4]," in err and "3 completions" in err


def test_without_pred_there_is_no_vote_and_a_message_says_why(capsys):
    records = evaluate(GTPO, "", [question("10")], ks=[1, 2])
    assert {r.metric for r in records} == {"pass"}
    err = capsys.readouterr().err
    assert "no maj@k" in err and "no `pred`" in err


def test_the_papers_table_is_whole():
    rows = evaluation._paper_table()
    assert len(rows) == 12 and all(len(row) == 3 + 20 for row in rows.values())
    assert rows[Label("qwen", "math", "gtpo")]["amc2023 maj@4"] == "52.5"
    assert rows[Label("llama", "gsm8k", "sft")]["amc2023 maj@64"] == "17.5"


def test_the_command_prints_the_papers_figure_beside_ours_and_writes_every_figure(tmp_path, capsys):
    rows = [dump_row(f"{q}_{s}_0", float(s % 2), "42" if s % 2 else "1", prompt=q) for q in "ab" for s in range(8)]
    dump = write_dump(tmp_path / "500.jsonl", rows)
    arguments = [f"Qwen/MATH/{method}/AIME2025={dump}" for method in ("GTPO", "mine|")]  # both questions agree
    assert main(["evaluate", *arguments, "--k", "1", "8", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2:] == [
        "| Qwen | MATH | GTPO | AIME2025 pass@1 | 3.3 | 0.0 | 50.0 |  |",
        r"| Qwen | MATH | mine\| | AIME2025 pass@1 |  | 0.0 | 50.0 |  |",
        "| Qwen | MATH | GTPO | AIME2025 pass@8 | 10.0 | 100.0 | 100.0 |  |",
        r"| Qwen | MATH | mine\| | AIME2025 pass@8 |  | 100.0 | 100.0 |  |",
        "| Qwen | MATH | GTPO | AIME2025 maj@8 |  | 50.0 | 50.0 |  |",
        r"| Qwen | MATH | mine\| | AIME2025 maj@8 |  | 50.0 | 50.0 |  |",
    ]
    assert (tmp_path / "out/table.md").read_text(encoding="utf-8") == out
    records = json.loads((tmp_path / "out/evaluation.json").read_text(encoding="utf-8"))["records"]
    assert [(r["metric"], r["k"], r["estimate"], r["draw"]) for r in records[:2]] == [
        ("pass", 1, 50.0, 0.0),
        ("pass", 8, 100.0, 100.0),
    ]


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("Qwen/MATH/GTPO=a.jsonl", (Label("Qwen", "MATH", "GTPO"), "", "a.jsonl")),
        ("Qwen/MATH/GTPO/AIME2024=x=1/a.jsonl", (Label("Qwen", "MATH", "GTPO"), "AIME2024", "x=1/a.jsonl")),
        ("grpo=a.jsonl", (Label("", "", "grpo"), "", "a.jsonl")),
        ("runs/500.jsonl", (Label("", "", "500"), "", "runs/500.jsonl")),
    ],
)
def test_a_dump_is_named_by_what_stands_before_the_equals_sign(argument, expected):
    label, data_set, path = parse_dump_argument(argument)
    assert (label, data_set, str(path)) == expected


@pytest.mark.parametrize(
    "labels, message",
    [
        (["Qwen/GTPO"], "label 'Qwen/GTPO': .*METHOD, MODEL/TRAINING SET/METHOD"),
        (["gtpo", "gtpo"], "repeats 1 questions .* own label"),
        (["Qwen/MATH/GTPO/AIME2024"], "rows of 'openai/gsm8k': .*'AIME2024'"),
    ],
)
def test_a_label_that_says_too_little_or_contradicts_is_refused(tmp_path, labels, message):
    dumps = [
        write_dump(tmp_path / f"{step}.jsonl", [dump_row(f"{step}_0_0", 1.0, data_source="openai/gsm8k")])
        for step in range(len(labels))
    ]
    with pytest.raises(ValueError, match=message):
        evaluate_dumps([f"{label}={dump}" for label, dump in zip(labels, dumps, strict=True)])


@pytest.mark.parametrize(
    "arguments, reason",
    [(["missing.jsonl"], "No such file"), (["--k", "0"], "--k must"), (["--k", "64"], "no k is")],
)
def test_the_command_ends_with_status_two_and_a_reason(arguments, reason, tmp_path, capsys):
    dump = write_dump(tmp_path / "1.jsonl", [dump_row("a_0_0", 1.0)])
    assert main(["evaluate", str(dump), *arguments]) == 2
    assert f"python3 -m recipes evaluate: {reason}" in capsys.readouterr().err.replace("[Errno 2] ", "")
