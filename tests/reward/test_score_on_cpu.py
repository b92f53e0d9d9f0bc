import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_process import run_python

from gtpo_verl import reward
from gtpo_verl.reward.score import (
    MAX_ANSWER_CHARS,
    TAGS,
    canonicalize,
    closing_brace,
    compute_format_reward,
    compute_score,
    extract_answer,
    is_equal,
    is_strict,
)
from recipes.paper.data import SYSTEM_PROMPT


def completion(answer: str) -> str:
    return f"<reasoning>some thought</reasoning><answer>{answer}</answer>"


def score(solution_str: str, ground_truth: str = "5") -> dict:
    return compute_score("test", solution_str, ground_truth)


def test_the_prompt_asks_for_the_four_tags():
    assert all(tag in SYSTEM_PROMPT for tag in TAGS)


@pytest.mark.parametrize(
    ("solution_str", "expected"),
    [
        (completion("1"), 10.0),
        ("</answer> <answer> </reasoning> <reasoning>", 10.0),
        ("<reasoning>thought</reasoning> 1", 1.0),
        ("<answer>1</answer>", 1.0),
        ("<reasoning>thought</reasoning><answer>1", 1.0),
        ("thought</reasoning>", 1.0),
        ("1", 0.0),
        ("<Reasoning></Reasoning><Answer></Answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_ten_for_all_tags_one_for_some_nought_for_none(solution_str, expected):
    assert compute_format_reward(solution_str) == expected


def test_the_room_has_the_function_that_a_config_names():
    assert reward.compute_score is compute_score and not hasattr(reward, "compute_scores")


def test_score_is_format_plus_ten_times_accuracy():
    right = {"score": 20.0, "format": 10.0, "acc": 1.0, "pred": "5", "strict": 1.0, "timeout": 0.0}
    assert score(completion("5")) == right
    assert score(completion("6"))["score"] == 10.0
    assert score("6") == {"score": 0.0, "format": 0.0, "acc": 0.0, "pred": "", "strict": 0.0, "timeout": 0.0}


def test_accuracy_does_not_depend_on_format():
    result = score("blah <answer> 5 </answer> blah")
    assert (result["acc"], result["format"], result["score"]) == (1.0, 1.0, 11.0)


@pytest.mark.parametrize(
    ("solution_str", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>1</answer> no, 2</answer>", "1"),
        ("<answer><answer>1</answer></answer>", "1"),
        ("1</answer><answer>", ""),
        ("<answer>1", ""),
        ("", ""),
        (f"<answer>{'1' * MAX_ANSWER_CHARS}</answer>", "1" * MAX_ANSWER_CHARS),
        (f"<answer>{'1' * (MAX_ANSWER_CHARS + 1)}</answer>", ""),
    ],
)
def test_the_answer_is_the_last_complete_pair(solution_str, answer):
    assert extract_answer(solution_str) == answer


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        ("1234", "1,234"),
        ("1234", "1{,}234"),
        ("1234", r"1,\!234"),
        ("11111111", r"11,\! 111,\! 111"),
        ("25", "025"),
        ("27.0", "27"),
        ("18", "$18"),
        ("18", r"\$18.00"),
        ("-3", "\u22123"),
        ("50", r"50\%"),
        ("18", "18 dollars"),
        ("100", "100 miles per hour"),
        ("5", r"5\text{ cm}"),
        (r"15\mbox{ cm}^2", "15"),
        (r"336^\circ", "336"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "2/4"),
        ("0.333333", "1/3"),
        ("3/2", "1 1/2"),
        (r"-\frac{3}{2}", "-1 1/2"),
        ("-5", "$\u20135$"),
        ("-1/2", "\u2013\\frac{1}{2}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"x^2+2x+1", "(x+1)^2"),
        (r"2\pi", r"$2 \pi$"),
        ("42", r"\(\boxed{42}\)."),
        ("5", "x=5"),
        ("5", "**5**"),
        ("1,2", "2, 1"),
        ("(1,2)", r"\left( 1, 2 \right)"),
        (r"\text{even}", "even"),
        (r"\text{(A)}", "A"),
        (r"\text{B,C}", "B, C"),
        (r"\text{June 20}", "June 20"),
        ("a + b + c", "a+b+c"),
        ("15", "15 cm^2"),
        ("15", "15in^2"),
        (r"\sqrt{12.5}", "√12.5"),
        ("2/3", "2/3 cups"),
        ("60", "60 percent"),
        (r"5\sqrt{2}", "5√2"),
        (r"2\sqrt{3}", "2 sqrt(3)"),
        (r"\frac{\pi}{2}", "pi/2"),
        (r"(-\infty,2)\cup(3,\infty)", "(-∞, 2) ∪ (3, ∞)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_equal_answers_are_right_however_they_are_written(ground_truth, answer):
    assert is_equal(ground_truth, answer)


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        ("5", "15"),
        ("5", "5.005"),
        ("5", "-5"),
        ("5", ""),
        ("5", "5 or 15"),
        ("15", "5 or 15"),
        ("6", "1 2 3 4 5 6"),
        ("3", "x+3"),
        ("3", "3 pi"),
        ("2", "sqrt(2)"),
        ("2", "2 million"),
        ("5", "5 millions"),
        ("3", "3 halves"),
        ("3", "3 fourths"),
        ("1", "1 quarter"),
        ("3", "3 dozens"),
        ("3", "3 tens"),
        ("3", "3 sixteenths"),
        ("3/2", "11/2"),
        ("2", "2 theta"),
        ("2", "2/3 cups"),
        ("2", "2√3"),
        ("3", "3xy^2"),
        ("3", "3 xy^2"),
        (r"\sqrt{3}", "√12.5"),
        ("1", "sqrt()"),
        ("0", "1"),
        ("2", "2 arcsin"),
        ("1/3", "0.33"),
        (r"\frac{1}{2}", r"\frac{1"),
        (r"\frac{1}{2}", "1/0"),
        ("(1,2)", "(2,1)"),
        (r"\text{even}", "odd"),
    ],
)
def test_different_answers_are_wrong(ground_truth, answer):
    assert not is_equal(ground_truth, answer)


@pytest.mark.parametrize(
    ("solution_str", "expected"),
    [
        ("<reasoning>a</reasoning><answer>1</answer>", True),
        ("\n<reasoning>\na\n</reasoning>\n\n<answer>\n1\n</answer>\n", True),
        ("<reasoning>a</reasoning><answer>1</answer> and on", False),
        ("so <reasoning>a</reasoning><answer>1</answer>", False),
        ("<reasoning>a</reasoning> so <answer>1</answer>", False),
        ("<reasoning>a</reasoning><answer>1</answer><answer>1</answer>", False),
        ("<answer>1</answer><reasoning>a</reasoning>", False),
        ("<reasoning><answer>1</answer></reasoning>", False),
        ("<reasoning>a</reasoning><answer>1", False),
        ("", False),
    ],
)
def test_strict_wants_both_blocks_once_and_nothing_else(solution_str, expected):
    assert is_strict(solution_str) is expected


@pytest.mark.parametrize(
    ("vote", "spellings"),
    [
        ("1/2", ["0.5", ".50", "1/2", r"\frac12", r"\dfrac{1}{2}", r"$\frac{2}{4}$"]),
        ("1200", ["1200", "1,200", "$1,200", "1200.", "1200 dollars", r"\boxed{1200}"]),
        ("-3", ["-3", "\u22123", r"-\frac{6}{2}", r"\frac{-6}{2}"]),
        ("(1,2)", ["(1, 2)", r"\left(1,2\right)"]),
        ("even", ["even", r"\text{even}", r"\mbox{ even }"]),
        ("", ["", " ", "\x00", "$$$$"]),
    ],
)
def test_spellings_of_one_answer_share_one_vote(vote, spellings):
    assert {canonicalize(spelling) for spelling in spellings} == {vote}


def test_different_answers_do_not_share_a_vote():
    answers = "5, 15, -5, 1/5, x+5, 5x, \\sqrt{5}, 1 2, 12, 1.2, even, odd".split(", ") + ["(1,2)", "(2,1)", "1, 2"]
    assert len({canonicalize(answer) for answer in answers}) == len(answers)


@given(st.integers(-(10**12), 10**12))
def test_an_integer_is_its_own_vote_with_and_without_separators(number):
    assert canonicalize(str(number)) == canonicalize(f"{number:,}") == canonicalize(f"{number}.00") == str(number)


def groups(parts):
    return st.lists(parts, max_size=4).map(lambda chosen: "{" + "".join(chosen) + "}")


@given(groups(st.recursive(st.sampled_from(["a", r"\{", r"\}", r"\\", "$"]), groups)))
def test_closing_brace_finds_the_end_of_a_group(group):
    assert closing_brace(group + "} {", 0) == len(group) - 1
    assert closing_brace("{" + group, 0) == -1


@given(st.lists(st.one_of(st.sampled_from([*TAGS, "\\", "{", "}", r"\frac", "$", "^", "5"]), st.text()), max_size=20))
def test_any_completion_gets_a_score_with_all_keys(parts):
    result = score("".join(parts))
    assert result.keys() == score("").keys()
    assert all(isinstance(value, str if key == "pred" else float) for key, value in result.items())
    assert result["score"] == result["format"] + 10 * result["acc"]
    assert result["pred"] == "" or result["pred"].isprintable()


@pytest.mark.parametrize(
    "solution_str",
    [
        completion("{" * 100_000 + "5" + "}" * 100_000),
        completion("{" * 100 + "5" + "}" * 100),
        completion("(" * 100),
        completion("[" * (MAX_ANSWER_CHARS - 1)),
        completion(r"\frac{1}{" * 20 + "2" + "}" * 20),
        completion("a" * 5_000_000),
        completion(" " * 5_000_000 + "6"),
        completion("\x00\x1b\u202e\ud800"),
        completion("$" * MAX_ANSWER_CHARS),
        completion("9" * MAX_ANSWER_CHARS),
        "<answer>" * 100_000,
        "<answer>6" * 100_000 + "</answer>" * 100_000,
        "<answer>6</answer>" * 100_000,
        "<reasoning>" * 100_000 + "</reasoning>" * 100_000,
        "<" * 5_000_000,
    ],
    ids=range(15),
)
def test_a_hostile_completion_is_wrong_at_once(solution_str):
    start = time.process_time()  # of this process alone, however busy the machine is
    result = score(solution_str)
    assert (result["acc"], result["timeout"]) == (0.0, 0.0)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("ground_truth", ["", "  ", "1" * (MAX_ANSWER_CHARS + 1), None, 5])
def test_a_ground_truth_that_nothing_can_equal_is_an_error(ground_truth):
    with pytest.raises(ValueError, match="ground_truth"):
        score(completion("5"), ground_truth)


def test_six_brackets_are_read_and_seven_are_not():
    assert is_equal("2+x", "((((((x+2))))))") and not is_equal("2+x", "(((((((x+2)))))))")


@pytest.mark.process
def test_it_scores_in_the_threads_of_a_ray_actor():
    code = """
import ray
@ray.remote(max_concurrency=4)
class Scorer:
    def score(self, answer, seconds=60.0):
        from gtpo_verl.reward import math_verify_process, score
        math_verify_process.TIMEOUT_SECONDS = seconds
        result = score.compute_score("test", f"<answer>{answer}</answer>", "7")
        return result["acc"], result["timeout"]
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
scorer = Scorer.remote()
results = ray.get([scorer.score.remote(answer) for answer in ("3+4", "3+5") * 4], timeout=600)
assert results == [(1.0, 0.0), (0.0, 0.0)] * 4, results
assert ray.get(scorer.score.remote("9^{9^{9^{9}}}", 1.0), timeout=600) == (0.0, 1.0)
"""
    run_python(code)
