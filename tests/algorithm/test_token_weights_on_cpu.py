"""λ of a user's own function, and the rules of `examples/token_weights.py` against slow references."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl import GTPOConfig, compute_gtpo, compute_gtpo_metrics, compute_token_weights
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.token_weights import FIELDS, compute_own_weights, fields_of, load_function
from studies import variants

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NO_ENTROPY = {"entropy_coeff": 0, "completion_filter": "never"}


@pytest.fixture
def rule(monkeypatch):
    """Makes `pkg://my_rules.rule` a function that a user wrote."""

    def make(function):
        monkeypatch.setitem(sys.modules, "my_rules", SimpleNamespace(rule=function))
        return "pkg://my_rules.rule"

    return make


def batch():
    return {
        "responses": torch.tensor([[5, 1, 2], [5, 3, 0], [6, 1, 2], [7, 7, 7]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        "entropy": torch.rand(4, 3, generator=torch.Generator().manual_seed(0)),
    }


def test_a_function_of_a_module_in_a_package_is_found(tmp_path, monkeypatch):
    package = tmp_path / "credit"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rules.py").write_text("def rule(advantages): ...")
    monkeypatch.syspath_prepend(tmp_path)
    function = load_function("pkg://credit.rules.rule", "key")
    assert function.__module__ == "credit.rules" and fields_of(function) == ["advantages"]


@pytest.mark.parametrize(
    ("weights", "column", "said"),
    [
        pytest.param([[1.0, float("nan"), 1.0]], 1, "finite", id="on an own token"),
        pytest.param([[1.0, 1.0, 2.0]], 2, "own", id="on padding"),
    ],
)
@pytest.mark.parametrize("is_a_key", [True, False])
def test_a_wrong_weight_is_named_with_its_token_and_where_it_comes_from(rule, weights, column, said, is_a_key):
    def function(responses):
        return torch.tensor(weights)

    key = rule(function)
    batch = {"responses": torch.tensor([[5, 1, 0]]), "response_mask": torch.tensor([[1, 1, 0]]), "entropy": None}
    batch |= {"group_ids": "p", "advantages": torch.tensor([1.0])}
    given_as = {"config": {"token_weights": key}} if is_a_key else {"token_weights": function}
    setting = f"algorithm.gtpo.token_weights={key} " if is_a_key else "token_weights "
    with pytest.raises(ValueError, match=rf"^{re.escape(setting)}.*token {column} of row 0.*{said}"):
        compute_gtpo(**batch, initial_entropy=0.0, **given_as)


def test_an_argument_that_is_no_field_is_named_with_the_function_and_the_fields():
    def my_rule(response): ...

    with pytest.raises(ValueError, match=r"my_rule.*\bresponse\b.*responses, response_mask"):
        fields_of(my_rule)


def test_a_function_may_take_further_arguments():
    def rule(advantages, *args, response_mask, **kwargs):
        assert not args and not kwargs
        return response_mask.float()

    assert fields_of(rule) == ["advantages", "response_mask"]
    completions = Completions(torch.ones(1, 2), "p")
    assert compute_own_weights(rule, {"advantages": torch.ones(1)}, completions).tolist() == [[1.0, 1.0]]


def test_a_function_in_place_of_its_name_is_sent_where_it_belongs():
    with pytest.raises(ValueError, match=r"compute_gtpo\(token_weights="):
        GTPOConfig(token_weights=lambda responses: responses)


def test_what_is_no_tensor_is_named_by_its_type():
    completions = Completions(torch.ones(1, 1), "p")
    with pytest.raises(ValueError, match=r"^token_weights .*\blist\b"):
        compute_own_weights(lambda: [1.0], {}, completions)


def test_lambda_of_a_single_token_is_its_mean():
    one = torch.ones(1, 1)
    result = compute_gtpo(
        responses=one.long(),
        response_mask=one,
        group_ids="p",
        advantages=torch.tensor([0.5]),
        entropy=one,
        token_weights=lambda: 3 * one,
        config=GTPOConfig(completion_filter="never"),
    )
    metrics = compute_gtpo_metrics(result, GTPOConfig(completion_filter="never", initial_entropy=0.2))
    assert metrics["gtpo/lambda/mean"] == 3
    assert metrics["gtpo/group/positive_frac"] == 1
    assert metrics["gtpo/entropy/initial"] == pytest.approx(0.2)


def test_a_function_gets_copies_of_the_fields_that_it_names_and_gives_lambda(rule):
    seen = {}

    def function(old_log_probs, responses, response_mask, uids, groups, advantages, entropy, factor=2):
        seen.update({name: value.clone() for name, value in locals().items() if name in FIELDS})
        for value in (responses, response_mask, uids, groups, advantages, entropy, old_log_probs):
            value.zero_()
        return torch.arange(12.0).reshape(4, 3) * seen["response_mask"] / factor

    given_ = batch()
    completions = Completions(given_["response_mask"], ["p", "p", "p", "pad"], prompts=["x", "x", "y", "x"])
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0])
    log_probs = -torch.rand(4, 3)
    result = compute_gtpo(
        **given_,
        group_ids=completions,
        advantages=advantages,
        old_log_probs=log_probs,
        config={"token_weights": rule(function), "completion_filter": "never"},
    )
    assert set(seen) == set(FIELDS)
    assert seen["responses"].equal(given_["responses"]) and seen["old_log_probs"].equal(log_probs)
    assert seen["response_mask"].equal(given_["response_mask"].bool()) and seen["entropy"].equal(given_["entropy"])
    assert seen["uids"].tolist() == [0, 0, 0, 1] and seen["groups"].tolist() == [0, 0, 1, 2]
    assert seen["advantages"].equal(advantages) and advantages.tolist() == [1, -1, 0.5, 0]

    weights = torch.tensor([[0, 0.5, 1], [1.5, 2, 0], [3, 3.5, 4], [0, 0, 0]])
    assert result.token_weights.equal(weights) and result.conflicts is None
    expected = (advantages - 0.1 * result.trajectory_entropy).unsqueeze(-1) * weights
    torch.testing.assert_close(result.advantages, expected)


def test_responses_of_another_shape_are_an_error_under_a_rule_too():
    with pytest.raises(ValueError, match=r"^responses has shape \(2, 3\)"):
        compute_gtpo(
            responses=torch.ones(2, 3, dtype=torch.int64),
            response_mask=torch.ones(2, 2),
            group_ids="aa",
            entropy=None,
            advantages=torch.tensor([1.0, -1.0]),
            initial_entropy=0.3,
            token_weights=lambda response_mask: response_mask.float(),
        )


def test_a_function_in_python_needs_no_name():
    given_ = batch()
    result = compute_gtpo(
        **given_,
        group_ids="pppq",
        advantages=torch.tensor([1.0, -1.0, 0.5, 0.0]),
        config=NO_ENTROPY,
        token_weights=lambda response_mask: response_mask / 4,
    )
    assert result.advantages[:, 0].tolist() == [0.25, -0.25, 0.125, 0]


def test_metrics_of_lambda_are_those_of_the_weights():
    """Group p, A of 1 and −1: the mean of λ − 1 is −1/2 and 1/4. No mask, so nothing of it is logged."""
    result = compute_gtpo(
        responses=torch.zeros(3, 4, dtype=torch.int64),
        response_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]),
        entropy=torch.zeros(3, 4),
        group_ids="ppq",
        advantages=torch.tensor([1.0, -1.0, 0.0]),
        config=NO_ENTROPY,
        token_weights=lambda: torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.5, 1.0, 0.0, 0.0], [1.0] * 4]),
    )
    metrics = compute_gtpo_metrics(result, NO_ENTROPY)
    assert metrics["gtpo/lambda/mean"] == pytest.approx(8.5 / 10)
    assert metrics["gtpo/lambda/zeroed_frac"] == pytest.approx(2 / 10)
    assert metrics["gtpo/lambda/amplified_frac"] == pytest.approx(1 / 10)
    assert metrics["gtpo/lambda/signal_residual"] == pytest.approx((-0.5 + 0.25) / 0.75)
    assert not [name for name in metrics if "conflict" in name]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"NoneType: .*floats, \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.bool), r"torch\.bool \(2, 3\): .*floats"),
        (torch.ones(2, 3, dtype=torch.int64), r"torch\.int64 \(2, 3\): .*floats"),
        (torch.ones(2), r"torch\.float32 \(2,\): .*floats, \(2, 3\)"),
        (torch.tensor([[1, torch.nan, 1], [1, 1, 0]]), r"token 1 .*row 0 \(uid p\) .*weight nan"),
        (torch.tensor([[1, 1, 1], [1, 1, 0.5]]), r"token 2 .*row 1 \(uid q\) .*weight 0\.5.*is not"),
    ],
    ids=["none", "bool", "int64", "one a row", "nan", "off the mask"],
)
def test_weights_of_another_kind_shape_or_owner_are_refused(weights, message):
    completions = Completions(torch.tensor([[1, 1, 1], [1, 1, 0]]), "pq")
    with pytest.raises(ValueError, match=rf"^the key .*{message}"):
        compute_own_weights(lambda: weights, {}, completions, "the key")


@pytest.mark.parametrize("off_the_mask", [0.0, 1.0])
def test_off_the_mask_0_and_1_become_0(off_the_mask):
    completions = Completions(torch.tensor([[1, 0]]), "p")
    weights = compute_own_weights(lambda: torch.tensor([[0.5, off_the_mask]]), {}, completions)
    assert weights.tolist() == [[0.5, 0.0]]


def test_a_field_that_the_caller_has_not_is_named():
    with pytest.raises(ValueError, match="^token_weights asks for old_log_probs,"):
        compute_gtpo(
            **batch(),
            group_ids="pppq",
            advantages=torch.zeros(4),
            config=NO_ENTROPY,
            token_weights=lambda old_log_probs: old_log_probs,
        )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pkg://no_such_module.rule", "No module named 'no_such_module'"),
        ("pkg://math.no_such_function", "no attribute 'no_such_function'"),
        ("pkg://math.pi", "not a callable"),
        ("pkg://json.dumps", "argument obj "),
        ("pkg://fails_to_load.rule", "'missing' is not defined"),
        ("pkg://rule", "."),
        ("pkg://", "."),
        ("my_rules.rule", "no pkg://"),
    ],
)
def test_a_function_that_is_not_there_is_named_at_the_start(name, why, tmp_path, monkeypatch):
    (tmp_path / "fails_to_load.py").write_text("missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo\.token_weights={name}: .*{why}.*; .*pkg://module\.func"):
        GTPOConfig(token_weights=name)


@pytest.mark.parametrize(
    ("key", "value"), [("conflict_masks", "forward"), ("conflict_span", "all"), ("conflict_weight_positive", 3)]
)
def test_a_key_of_the_conflict_masks_is_refused_beside_a_rule_of_ones_own(rule, key, value):
    with pytest.raises(
        ValueError, match=rf"^algorithm\.gtpo\.{key}=.* with algorithm\.gtpo\.token_weights=pkg://my_rules"
    ):
        GTPOConfig(token_weights=rule(lambda: None), **{key: value})


def test_the_functions_of_ones_own_that_do_what_gtpo_does_change_nothing(rule):
    """Eq. 9 by way of the seam."""

    def eq_9(responses, response_mask, groups, advantages):
        return compute_token_weights(
            responses=responses, response_mask=response_mask, group_ids=groups, advantages=advantages
        )

    torch.manual_seed(0)
    mask = (torch.arange(6) < torch.randint(2, 7, (8, 1))).long()
    fields = {
        "responses": torch.randint(0, 2, (8, 6)),
        "response_mask": mask,
        "entropy": torch.rand(8, 6),
        "rewards": torch.randint(0, 3, (8,)) / 4,
        "group_ids": "ppppqqqq",
        "initial_entropy": 0.3,
    }
    ours, theirs = compute_gtpo(**fields), compute_gtpo(**fields, config={"token_weights": rule(eq_9)})
    assert len(ours.conflicts.rows) and ours.advantages.equal(theirs.advantages)
    assert ours.token_weights.where(mask.bool(), 0).equal(theirs.token_weights)
    of_ours, of_theirs = compute_gtpo_metrics(ours, None, 0.3), compute_gtpo_metrics(theirs, None, 0.3)
    assert of_theirs == pytest.approx({name: of_ours[name] for name in of_theirs})


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    own = st.integers(0, width).map(lambda n: [1] * n + [0] * (width - n))
    holes = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    return {
        "responses": torch.tensor(draw(st.lists(tokens, min_size=rows, max_size=rows))),
        "response_mask": torch.tensor(draw(st.lists(own | holes, min_size=rows, max_size=rows))),
        "group_ids": draw(st.lists(st.sampled_from("ab"), min_size=rows, max_size=rows)),
        "advantages": torch.tensor(draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=rows, max_size=rows))),
        "entropy": torch.tensor(draw(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.9]), min_size=width, max_size=width)))
        + 1e-3 * torch.arange(rows).unsqueeze(-1),
    }


def weights_of(name, fields):
    """λ by the example of this name."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        function = load_function(f"pkg://token_weights.{name}", "example")
    finally:
        sys.path.remove(str(EXAMPLES))
    return compute_gtpo(**fields, config=NO_ENTROPY, token_weights=function).token_weights


@given(batches())
def test_lambda_grpo_is_one_over_the_completions_with_the_same_beginning(fields):
    responses, mask, uids = fields["responses"].tolist(), fields["response_mask"].tolist(), fields["group_ids"]
    ends = [max((t + 1 for t, own in enumerate(row) if own), default=0) for row in mask]
    expected = torch.zeros(fields["responses"].shape)
    for i, row in enumerate(mask):
        for t, own in enumerate(row):
            same = [
                j
                for j in range(len(mask))
                if uids[j] == uids[i] and ends[j] > t and responses[j][: t + 1] == responses[i][: t + 1]
            ]
            if own:
                expected[i, t] = 1 / len(same)
    torch.testing.assert_close(weights_of("lambda_grpo", fields), expected)


@given(batches())
def test_the_tokens_of_highest_entropy_are_a_fifth_and_those_as_high_as_the_last(fields):
    own = [
        (entropy, i, t)
        for i, (row, mask) in enumerate(zip(fields["entropy"].tolist(), fields["response_mask"], strict=True))
        for t, entropy in enumerate(row)
        if mask[t]
    ]
    own.sort(reverse=True)
    number = -(-len(own) // 5)
    expected = torch.zeros(fields["responses"].shape)
    for entropy, i, t in own:
        expected[i, t] = float(entropy >= own[number - 1][0])
    assert weights_of("highest_entropy", fields).equal(expected)


@given(batches())
def test_the_shared_beginning_is_the_common_one_of_the_study(fields):
    mask = fields["response_mask"].sort(descending=True).values  # without tool output
    fields = fields | {"response_mask": mask}
    groups = Completions(mask, fields["group_ids"]).groups
    ids = variants.own_tokens(fields["responses"], mask.bool())
    common = variants.common(ids, groups.tolist(), fields["advantages"].tolist())
    weights = weights_of("shared_beginning", fields)
    for row, (is_common, a) in enumerate(zip(common, fields["advantages"].tolist(), strict=True)):
        expected = [{1.0: 2.0, 0.0: 1.0, -1.0: 0.0}[a] if shared else 1.0 for shared in is_common]
        assert weights[row][mask[row].bool()].tolist() == expected


def test_every_example_is_named_on_the_page():
    source = (EXAMPLES / "token_weights.py").read_text()
    page = (EXAMPLES.parent / "docs/paper-vs-code.md").read_text()
    names = re.findall(r"^def (\w+)", source, re.MULTILINE)
    assert len(names) == 3 and all(f"`{name}`" in page for name in names)
    sys.path.insert(0, str(EXAMPLES))
    try:
        rules = [load_function(f"pkg://token_weights.{name}", "example") for name in names]
        assert all(set(fields_of(rule)) <= set(FIELDS) for rule in rules)
    finally:
        sys.path.remove(str(EXAMPLES))
