"""The study's fast loop: its models, its sampling and its controls. Its step: tests/e2e/test_fast_study_on_cpu.py."""

import io
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from recipes.tasks import tiny
from studies import fast
from studies import model as fast_model
from studies.model import Rollout, Shape, fuse, hidden, log_probs, logits_of, product, product_dtype, sample
from studies.plan import METHODS
from studies.tasks import Asked, Task

EOS = 1
GOOD = "<reasoning>3</reasoning><answer>3</answer>"
PROMPT = torch.tensor([2, 9, 8, 7, 3])
PROMPTS = [PROMPT, torch.tensor([2, 9, 4]), torch.tensor([2, 5, 5, 5, 8, 6, 3])]

# Adam divides by the gradient's size: where that is near 0, another processor's order of sums would decide.
LARGE_EPS = "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3"


def weights_of(model):
    return {name: values.detach().unsqueeze(0) for name, values in model.named_parameters()}


@pytest.fixture(scope="module")
def models():
    """Three models of random weights that differ."""
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    return [tiny.build_model(tokenizer).eval() for _ in range(3)]


@pytest.fixture(scope="module")
def shape(models):
    return Shape.of(models[0].config)


@pytest.fixture(scope="module")
def weights(models):
    return [weights_of(model) for model in models]


@pytest.fixture(scope="module")
def llama():
    """As SmolLM2: three queries to a key, tied embeddings, no bias."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=71,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def on_gpu(monkeypatch):
    """Switch to the paths of a GPU, but for the graph, and back."""
    monkeypatch.setattr(fast_model, "_decoders", {})
    return lambda on: monkeypatch.setattr(fast_model, "_on_gpu", lambda tensor: on)


def draw(shape, weights, seeds, n=8, limit=12, prompts=(PROMPT,)):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return sample(shape, weights, prompts, n, limit, 1.0, EOS, generators)


@pytest.mark.parametrize("gpu", [False, True])
def test_log_probs_entropy_and_gradient_are_those_of_transformers_for_prompts_of_several_lengths(
    models, llama, on_gpu, gpu
):
    on_gpu(gpu)
    for model in (models[0], llama):
        shape = Shape.of(model.config)
        weights = {name: values.clone().requires_grad_() for name, values in weights_of(model).items()}
        (rollouts,) = draw(shape, [weights], [0], n=4, limit=9, prompts=PROMPTS)
        log_prob, entropy = log_probs(shape, weights, rollouts, 1.3, torch.float32, rows_at_once=5)
        model.zero_grad()
        expected = torch.zeros(log_prob.shape)
        rows = [(r.prompt, *row) for r in rollouts for row in zip(r.responses, r.response_mask.bool(), strict=True)]
        for row, (prompt, ids, mask) in enumerate(rows):
            logits = model(torch.cat([prompt, ids[mask]]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            distribution = (logits / 1.3).log_softmax(-1)
            own = distribution.gather(-1, ids[mask].unsqueeze(-1)).squeeze(-1)
            expected[row, : len(own)] = own
            torch.testing.assert_close(entropy[row, : len(own)], -(distribution.exp() * distribution).sum(-1))
        torch.testing.assert_close(log_prob, expected)
        log_prob.sin().sum().backward()
        expected.sin().sum().backward()
        # transformers trains no embedding of the padding token, which random models write; trained ones do not.
        weights["model.embed_tokens.weight"].grad[0, 0] = model.model.embed_tokens.weight.grad[0] = 0
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name].grad[0], parameter.grad, rtol=1e-4, atol=2e-5)


def test_sampling_draws_from_the_model(shape, weights):
    ((_, rollout, _),) = draw(shape, weights[:1], [0], n=8_000, limit=2, prompts=PROMPTS)
    fused = fuse(shape, weights[0])

    def following(*ids):
        ids = torch.cat([rollout.prompt, torch.tensor(ids, dtype=torch.long)])
        return logits_of(fused, hidden(fused, ids.view(1, 1, -1)))[0, 0, -1].softmax(-1)

    shares = torch.bincount(rollout.responses[:, 0], minlength=71) / 8_000
    assert (shares - following()).abs().max() < 0.03
    first = int(following()[2:].argmax()) + 2
    followed = rollout.responses[rollout.responses[:, 0] == first, 1]
    shares = torch.bincount(followed, minlength=71) / len(followed)
    assert (shares - following(first)).abs().max() < 0.08


def flat(runs):
    """Responses and masks of all runs and prompts."""
    return [tensor for own in runs for rollout in own for tensor in (rollout.responses, rollout.response_mask)]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("n", "limit", "prompts"), [(8, 40, PROMPTS), (1, 200, [PROMPT])])
def test_a_run_draws_the_same_whatever_runs_are_beside_it(shape, weights, on_gpu, gpu, n, limit, prompts):
    """And so does its next draw. Of seven runs of one completion some end while the others go on."""
    on_gpu(gpu)
    together, alone = ([torch.Generator().manual_seed(seed) for seed in range(7)] for _ in range(2))
    several = [weights[run % 3] for run in range(7)]
    for _ in range(2):
        drawn = sample(shape, several, prompts, n, limit, 1.0, EOS, together)
        assert n > 1 or len({own[0].responses.shape[1] for own in drawn}) > 3
        for run in range(7):
            own = sample(shape, several[run : run + 1], prompts, n, limit, 1.0, EOS, alone[run : run + 1])
            for one, other in zip(flat(own), flat(drawn[run : run + 1]), strict=True):
                assert torch.equal(one, other)


def test_a_gpu_samples_the_same_completions(shape, weights, llama, on_gpu):
    """Also with other weights, and with longer and shorter prompts, where the last draw has left its own."""
    for its_shape, own in ((shape, weights), (Shape.of(llama.config), [weights_of(llama)] * 3)):
        draws = [(own, PROMPTS), (own[::-1], [PROMPTS[2]] * 3), (own, [PROMPTS[1]] * 3), (own, PROMPTS)]
        drawn, decoders = {}, []
        for gpu in (False, True):
            on_gpu(gpu)
            for chosen, prompts in draws:
                drawn.setdefault(gpu, []).extend(flat(draw(its_shape, chosen, [0, 1, 2], 8, 40, prompts)))
                decoders += fast_model._decoders.values()
        assert len(decoders) == 4 and len(set(decoders)) == 1
        for one, other in zip(drawn[False], drawn[True], strict=True):
            assert torch.equal(one, other)
        fast_model._decoders.clear()


def test_a_run_that_has_become_nan_does_not_spoil_the_next_draw(shape, weights, on_gpu):
    on_gpu(True)
    expected = flat(draw(shape, weights, [0, 1, 2], limit=12, prompts=PROMPTS))
    (decoder,) = fast_model._decoders.values()
    for kv in decoder.cache.layers.values():
        kv.fill_(torch.nan)
    for one, other in zip(flat(draw(shape, weights, [0, 1, 2], limit=12, prompts=PROMPTS)), expected, strict=True):
        assert torch.equal(one, other)


def test_nothing_stands_behind_the_end_of_a_completion(shape, weights):
    for (rollout,) in draw(shape, weights, [0, 1, 2], n=200, limit=40):
        ended = rollout.response_mask == 0
        assert ended.any() and (rollout.responses[ended] == EOS).all()
        before_last = rollout.response_mask.cumsum(-1) < rollout.response_mask.sum(-1, keepdim=True)
        assert (rollout.responses[before_last] != EOS).all()


def batch_of_four():
    """Four completions: two tokens shared by all at the start, three at the end, the second and the fourth bad."""
    rows = [[5, 6, 7, 8, 9, EOS], [5, 6, 3, 4, 8, 9, EOS], [5, 6, 2, 2, 2, 8, 9, EOS], [5, 6, 8, 9, EOS]]
    mask = torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in rows])
    responses = torch.tensor([row + [EOS] * (8 - len(row)) for row in rows])
    rewards = torch.zeros(4, 8)
    rewards[:, 0] = torch.tensor([20.0, 10.0, 20.0, 0.0])
    advantages, index = compute_grpo_outcome_advantage(rewards, mask, [0] * 4)[0], torch.zeros(4).numpy()
    old_log_prob = -torch.arange(32.0).view(4, 8)
    tensors = responses, mask, old_log_prob, torch.zeros(4, 8), index, advantages[:, 0]
    return fast.Batch([Rollout(PROMPT, responses, mask)], *tensors), advantages


def test_without_negative_updates_the_others_stay():
    batch, advantages = batch_of_four()
    only_positive = fast.drop_negative(advantages, batch, torch.Generator().manual_seed(0))
    assert torch.equal(only_positive, torch.where(advantages > 0, advantages, 0))


@pytest.mark.parametrize("control", [fast.skip_at_random, fast.skip_confident])
def test_controls_take_away_negative_updates_and_nothing_else(control):
    batch, advantages = batch_of_four()
    skipped = control(advantages, batch, torch.Generator().manual_seed(0))
    positive = advantages[:, 0] > 0
    assert torch.equal(skipped[positive], advantages[positive])
    # Of the second completion two tokens are on the forward and three on the backward mask, of the fourth all.
    zeroed = (skipped == 0) & (batch.response_mask == 1)
    assert zeroed.sum(-1).tolist() == [0, 5, 0, 5]
    if control is fast.skip_confident:
        assert zeroed[1, :5].all()  # the most probable ones


def test_the_tokens_of_the_format_are_those_that_write_the_tags_and_the_end():
    tokenizer = tiny.build_tokenizer()
    text = "<reasoning>1+2</reasoning>a<answer>3</answer>"
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id, tokenizer.eos_token_id]
    mask = torch.ones(1, len(ids))
    (marked,) = fast.template_mask([Rollout(PROMPT, torch.tensor([ids]), mask)], tokenizer)
    assert tokenizer.decode(torch.tensor(ids)[marked == 0]) == "1+2a3"


@pytest.mark.parametrize("method", ["grpo_kl", "gtpo", "grpo_betas", "dr_grpo"])
def test_a_config_holds_what_its_method_says(method):
    config = fast.build_config(METHODS[method])
    assert config.algorithm.adv_estimator == ("gtpo" if method == "gtpo" else "grpo")
    assert config.algorithm.norm_adv_by_std_in_grpo == (method != "dr_grpo")
    assert config.actor_rollout_ref.actor.use_kl_loss == (method == "grpo_kl")
    assert list(config.actor_rollout_ref.actor.optim.betas) == ([0.999999] * 2 if "betas" in method else [0.9, 0.95])


def test_under_grpo_clamped_no_wrong_completion_trains_upwards_and_nothing_is_masked(shape, weights):
    (rollouts,) = draw(shape, weights[:1], [0], n=4, limit=9, prompts=PROMPTS[:2])
    scores = [20.0, 10.0, 10.0, 0.0, 10.0, 10.0, 1.0, 1.0]  # the second group has no right answer
    kept = {}
    for method in ("grpo", "grpo_clamped", "gtpo_clamped"):
        learner = fast.Learner(
            shape, weights[0], fast.build_config([*METHODS[method], "algorithm.gtpo.initial_entropy=9"])
        )
        learner.step(rollouts, scores, kept=kept.setdefault(method, []))
    for plain, clamped, gtpo, score in zip(*kept.values(), scores, strict=True):
        assert clamped["a"] == gtpo["a"] == pytest.approx(plain["a"] if score >= 11 else min(plain["a"], 0), abs=1e-6)
        assert clamped["advantages"] == pytest.approx([clamped["a"]] * len(clamped["ids"]))
    assert kept["gtpo_clamped"][0]["advantages"] != kept["grpo_clamped"][0]["advantages"]


def test_another_rule_weighs_the_tokens_of_each_completion(shape, weights):
    (rollouts,) = draw(shape, weights[:1], [0], n=4, limit=9, prompts=PROMPTS[:2])
    kept = {}
    for method in ("grpo", "prefix_weights", "highest_entropy", "shared_beginning"):
        learner = fast.Learner(shape, weights[0], fast.build_config(METHODS[method]))
        learner.step(rollouts, [10.0, 0.0, 20.0, 0.0, 5.0, 5.0, 6.0, 5.0], kept=kept.setdefault(method, []))
    rows = {method: [record["advantages"] for record in records] for method, records in kept.items()}
    outcomes = [record["a"] for record in kept["grpo"]]
    ids = [record["ids"] for record in kept["grpo"]]
    for row, (own, a) in enumerate(zip(ids, outcomes, strict=True)):
        group = [other for number, other in enumerate(ids) if number // 4 == row // 4]
        same = [sum(other[: t + 1] == own[: t + 1] for other in group) for t in range(len(own))]
        assert rows["prefix_weights"][row] == pytest.approx([a / number for number in same], rel=1e-5)
        is_shared = [number == 4 for number in same]
        weight = 2 if a > 0 else 0
        assert rows["shared_beginning"][row] == pytest.approx([a * (weight if x else 1) for x in is_shared], rel=1e-5)
        assert all(value in (0, pytest.approx(a, rel=1e-5)) for value in rows["highest_entropy"][row])
    trained = sum(value != 0 for row in rows["highest_entropy"] for value in row)
    assert 0 < trained <= 0.2 * sum(map(len, ids)) + 1


@pytest.mark.parametrize("method", ["grpo", "grpo_clamped", "masks", "gtpo", "prefix_weights", "highest_entropy"])
def test_completions_without_advantage_train_nothing(method, shape, weights, monkeypatch):
    (rollouts,) = draw(shape, weights[:1], [0], n=4, limit=9, prompts=PROMPTS[:2])
    config = fast.build_config([*METHODS[method], "algorithm.gtpo.initial_entropy=9", LARGE_EPS])
    after = {}
    for left_out in (True, False):
        learner = fast.Learner(shape, weights[0], config)
        if not left_out:
            monkeypatch.setattr(learner, "trained", lambda group_advantages: None)
        elif method in ("grpo", "gtpo"):
            assert learner.trained(torch.tensor([0.0, 0.0])) is None
            assert (learner.trained(torch.tensor([0.0, 1.0])) is None) == (method == "gtpo")
        logged = learner.step(rollouts, [10.0, 0.0, 20.0, 0.0, 5.0, 5.0, 5.0, 5.0])
        after[left_out] = learner.weights, logged
    assert after[True][1] == {name: pytest.approx(value, rel=1e-4) for name, value in after[False][1].items()}
    for name, values in after[False][0].items():
        torch.testing.assert_close(after[True][0][name], values, rtol=1e-4, atol=1e-7)


def test_each_step_is_written_as_it_is_made(shape, weights):
    task = Task([], [], tiny.build_tokenizer(), 9, shape, weights[0], 0.3, 0)
    learner = fast.Learner(shape, weights[0], fast.build_config(METHODS["grpo"]))

    class File(io.StringIO):
        def write(self, text):
            seen.append(len(learner.optimizer.state))
            return super().write(text)

    seen, file = [], File()
    (log,) = fast.train([learner], task, [Asked(PROMPT, "3")], 2, files=[file])
    steps = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and min(seen) > 0
    assert len(log.pop("seconds")) == 2
    assert {name: [step[name] for step in steps] for name in log} == log


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(shape, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "CHECKPOINT_EVERY", 2)
    task = Task([], [], tiny.build_tokenizer(), 9, shape, weights[0], 0.3, 0)
    order = [Asked(PROMPT, "3"), Asked(PROMPTS[1], "4"), Asked(PROMPT, "5")]

    def run(steps, checkpoint):
        config = fast.build_config([*METHODS["gtpo"], "algorithm.gtpo.initial_entropy=9", LARGE_EPS])
        learner = fast.Learner(shape, weights[0], config, seed=3)
        kept = [[]]
        (log,) = fast.train([learner], task, order, steps, kept, 4, checkpoint=checkpoint)
        return log, kept, learner.weights

    whole, kept, after = run(5, None)
    run(3, tmp_path / "run.pt")
    log, kept_too, after_too = run(5, tmp_path / "run.pt")
    del whole["seconds"], log["seconds"]
    assert log == {name: pytest.approx(values, rel=1e-4) for name, values in whole.items()}
    assert [[record["ids"] for record in step] for step in kept[0]] == [
        [record["ids"] for record in step] for step in kept_too[0]
    ]
    for name, values in after.items():
        torch.testing.assert_close(after_too[name], values, rtol=1e-4, atol=1e-6)


def test_a_run_that_is_asked_on_the_way_goes_on_as_if_it_had_not_been(shape, weights):
    task = Task([], [], tiny.build_tokenizer(), 9, shape, weights[0], 0.3, 0)
    order = [Asked(PROMPT, "3"), Asked(PROMPTS[1], "4")]
    config = fast.build_config([*METHODS["gtpo"], "algorithm.gtpo.initial_entropy=9"])
    asked_at = []

    def run(is_asked):
        learner = fast.Learner(shape, weights[0], config, seed=3)

        def ask(step):
            if is_asked:
                (result,) = fast.hold_out([learner], task, order, 3, 2)
                asked_at.append((step, result))

        (log,) = fast.train([learner], task, order, 3, after_step=ask)
        del log["seconds"]
        return log

    assert run(is_asked=True) == run(is_asked=False)
    assert [step for step, _ in asked_at] == [1, 2, 3]
    assert [len(texts) for texts in asked_at[0][1]["texts"]] == [3, 3]


@pytest.mark.parametrize(
    ("text", "measures"),
    [
        (GOOD + "<eos>", {"eos": 1, "well_formed": 1, "strict": 1}),
        (GOOD, {"eos": 0, "well_formed": 1, "strict": 0}),
        (GOOD + "3</answer><eos>", {"eos": 1, "well_formed": 1, "strict": 0}),
        ("<answer>3</answer><eos>", {"eos": 1, "well_formed": 0, "strict": 0}),
        ("<reasoning>3<eos>", {"eos": 1, "well_formed": 0, "strict": 0}),
    ],
)
def test_three_measures_of_a_completion(text, measures, shape, weights):
    tokenizer = tiny.build_tokenizer()
    ids = torch.tensor([tokenizer.encode(text.replace("<eos>", tokenizer.eos_token), add_special_tokens=False)])
    task = Task([], [], tokenizer, ids.shape[1], shape, weights[0], 0.3, 0)
    (score,) = fast.read_scores([Rollout(PROMPT, ids, torch.ones_like(ids))], [Asked(PROMPT, "3")], task, "paper")
    assert {name: score[name] for name in measures} == measures


@pytest.mark.parametrize("rows", [1, 40])
def test_products_in_bfloat16_are_rounded_once_with_or_without_instructions_for_them(rows, monkeypatch):
    generator = torch.Generator().manual_seed(5)
    sizes = (2, rows, 96), (2, 96, 64)
    x, y = (torch.randn(size, generator=generator).bfloat16().requires_grad_() for size in sizes)
    results = {}
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        assert product_dtype(torch.bfloat16, "cpu") == (torch.bfloat16 if has else torch.float32)
        result = product(x, y)
        results[has] = result, *torch.autograd.grad(result.float().sin().sum(), [x, y])
    for native, emulated in zip(*results.values(), strict=True):
        assert native.dtype == emulated.dtype == torch.bfloat16
        torch.testing.assert_close(native, emulated, rtol=2**-7, atol=2**-5)  # a different order of sums


def test_several_updates_per_rollout_keep_the_first_probabilities_and_clip(shape, weights):
    (rollouts,) = draw(shape, weights[:1], [0], n=4, limit=9, prompts=PROMPTS[:2])
    scores = [20.0, 10.0, 0.0, 0.0, 10.0, 20.0, 0.0, 10.0]
    settings = [*METHODS["grpo"], "actor_rollout_ref.actor.optim.lr=0.05", LARGE_EPS]
    after = {}
    for size, updates in ((2, 1), (1, 2)):
        config = fast.build_config([*settings, f"actor_rollout_ref.actor.ppo_mini_batch_size={size}"])
        learner = fast.Learner(shape, weights[0], config)
        made = []
        learner.optimizer.register_step_post_hook(lambda *_, made=made: made.append(1))
        learner.step(rollouts, scores)
        assert len(made) == updates
        after[size] = learner.weights["lm_head.weight"].detach()
    assert (after[1] - after[2]).abs().max() > 1e-3
    # The second update by itself: its ratios are to the probabilities from before the first.
    learner = fast.Learner(shape, weights[0], fast.build_config(settings))
    first = learner.log_probs(learner.weights, rollouts)[0].detach()
    learner.step(rollouts[:1], scores[:4])
    log_prob, entropy = learner.log_probs(learner.weights, rollouts[1:])
    index = torch.zeros(4).numpy()
    own = rollouts[1]
    of_completions = learner.group_advantages(torch.tensor(scores[4:]), own.response_mask, index)
    inputs = own.responses, own.response_mask, first[4:, : log_prob.shape[1]], entropy, index, of_completions
    batch = fast.Batch([own], *inputs)
    advantages, _ = learner.advantages(batch)
    learner.update(batch, log_prob, advantages, slice(0, 4))
    torch.testing.assert_close(learner.weights["lm_head.weight"].detach(), after[1])
