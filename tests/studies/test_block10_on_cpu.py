"""Block 10: its answers by the rules of studies/DESIGN.md, from logs that are made up."""

import pytest

from studies import block10, plan, run, tables
from studies.plan import AGAIN, CONTROL_SEEDS, LEGS, ON_GPU, Cell
from studies.titles import METHODS

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict")
GRPO, GTPO, CLAMPED = [0.5] * 6, [0.0, 0.0, 0.5, 0.0, 0.5, 0.2], [0.4, 0.5, 0.4, 0.6, 0.5, 0.5]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write logs of an arm on seeds 7 to 12, in the place of the study's, with these accuracies and clean endings."""
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setattr(plan, "_archives", lambda folder: {})
    plan.read_log.cache_clear()

    def written(method, accuracies, exact_format=(1.0,) * 6, start=LEGS, dtype="bfloat16", seeds=CONTROL_SEEDS):
        rate = 5e-6 if method == "gtpo_clamped" else 1e-5
        for seed, accuracy, exact in zip(seeds, accuracies, exact_format, strict=False):
            held_out = {"samples": 100, "right": [round(100 * accuracy)], "strict": [round(100 * exact)]}
            record = {"steps": dict.fromkeys(COLUMNS, [0.5] * 60), "held_out": held_out, "dtype": dtype}
            run.keep(record, Cell(start, method, rate).log(seed))

    yield written
    plan.read_log.cache_clear()


@pytest.fixture
def block_9(write):
    for method, accuracies in {"grpo": GRPO, "gtpo": GTPO, block10.CLAMPED: CLAMPED}.items():
        write(method, accuracies)
    return write


def answer(name, device="cpu"):
    return block10.answer(block10.QUESTIONS[name], block10.runs_on(device))


def test_without_runs_nothing_is_answered(block_9):
    for name, question in block10.QUESTIONS.items():
        assert answer(name) == f"not answered yet (0 of 6 runs of {METHODS[question.method]})"
    block_9("grpo_clamped", CLAMPED[:5])
    assert answer("Q1") == f"not answered yet (5 of 6 runs of {METHODS['grpo_clamped']})"
    header, rows = tables.failure_table(block10.runs_on("cpu"), plan.CONTROL_ARMS)
    assert [row[0] for row in rows] == [METHODS["grpo_clamped"]] and len(rows[0]) == len(header)
    assert (
        len(tables.comparison_table(block10.runs_on("cpu"), block10.COMPARED, 6)[1]) == 2
    )  # of block 9's arms with each other


@pytest.mark.parametrize(
    ("accuracies", "exact_format", "expected"),
    [
        (CLAMPED, [1] * 6, "consistent with the clamp doing it; GTPO adds nothing that these runs can see"),
        ([0.0, *CLAMPED[1:]], [1] * 6, "consistent with the clamp doing it; GTPO adds nothing that these runs can see"),
        (CLAMPED, [0.4, 0.4, 1, 1, 1, 1], "undecided"),  # two lost the exact format
        (CLAMPED, [0.4, *[0.8] * 5], "consistent with the clamp doing it; GTPO adds nothing that these runs can see"),
        ([0.9] * 6, [1] * 6, "undecided"),  # none failed, but they are more accurate
        (CLAMPED, [0.4] * 3 + [1] * 3, "undecided"),
        (CLAMPED, [0.4] * 4 + [1] * 2, "consistent with the masks being needed"),
        (GTPO, [1] * 6, "consistent with the masks being needed"),
    ],
)
def test_whether_it_is_the_clamp_follows_from_the_rule(block_9, accuracies, exact_format, expected):
    block_9("grpo_clamped", accuracies, exact_format)
    assert answer("Q1") == expected


def test_whether_it_is_gamma_or_the_reward_follows_from_the_rule(block_9):
    block_9("masks", CLAMPED, exact_format=[0.0] * 6)  # they run on, and do not shrink
    block_9("gtpo_answer", GTPO)
    block_9("gtpo_authors", [0.0, 0.0, *CLAMPED[2:]])
    assert answer("Q2") == "consistent with γ being what shrinks the completions"
    assert answer("Q3, answer alone") == "consistent with GTPO's accuracy collapsing under that reward too"
    assert answer("Q3, authors' reward") == "undecided"


def test_a_reward_is_judged_by_its_answers_alone(block_9):
    block_9("gtpo_answer", CLAMPED, exact_format=[0.0] * 6)
    assert answer("Q3, answer alone").startswith("consistent with the reward for the form")


def test_nothing_follows_where_gtpo_itself_did_not_fail(write):
    write("grpo", GRPO)
    write("gtpo", CLAMPED)
    write("masks", GTPO)
    assert answer("Q2") == "undecided"


@pytest.mark.parametrize(("gtpo", "expected"), [(0.0, "came back"), (0.5, "did not come back")])
def test_whether_block_9s_outcome_came_back(block_9, gtpo, expected):
    block_9(block10.CLAMPED, [0.4], start=AGAIN, seeds=[8])
    assert block10.repeated() == "is not there yet"
    block_9("gtpo", [gtpo], start=AGAIN, seeds=[8])
    assert block10.repeated() == expected


def test_devices_do_not_mix(block_9):
    block_9("grpo_clamped", GTPO, start=ON_GPU)
    assert answer("Q1") == f"not answered yet (0 of 6 runs of {METHODS['grpo_clamped']})"
    assert answer("Q1", "cuda") == f"not answered yet (0 of 6 runs of {METHODS[block10.CLAMPED]})"
    for method, accuracies in {"grpo": GRPO, block10.CLAMPED: CLAMPED}.items():
        block_9(method, accuracies, start=ON_GPU)
    block_9("grpo_clamped", CLAMPED)
    assert answer("Q1", "cuda") == "consistent with the masks being needed"
    assert answer("Q1").startswith("consistent with the clamp")


def test_dtypes_do_not_mix(block_9):
    block_9("grpo_clamped", CLAMPED, dtype="float32")
    with pytest.raises(ValueError, match="several dtypes"):
        block10.runs_on("cpu")


def test_block_9_by_the_exact_tests():
    """GTPO with the clamp has more of the exact format than GRPO on every seed, and its accuracy is not told apart."""
    plan.read_log.cache_clear()
    runs = block10.runs_on("cpu")
    differences = {
        (method, metric): block10.difference(runs, block10.CLAMPED, method, metric)
        for method in ("gtpo", "grpo")
        for metric in ("accuracy", "exact_format")
    }
    assert {key: said.rpartition("p ")[2].rstrip(")") for key, said in differences.items()} == {
        ("gtpo", "accuracy"): ".125",
        ("gtpo", "exact_format"): ".125",
        ("grpo", "accuracy"): ".625",
        ("grpo", "exact_format"): ".031",
    }
    assert differences["grpo", "exact_format"].startswith("+0.30 [")
    assert block10.difference(runs, "gtpo_answer", "gtpo", "exact_format") == "not run yet"
