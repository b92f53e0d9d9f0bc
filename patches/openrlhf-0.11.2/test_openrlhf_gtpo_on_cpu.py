"""The gtpo estimator in a patched OpenRLHF, on CPU; `bash patches/check.sh` runs it.

OpenRLHF's own modules, with its packages for CUDA replaced by mocks, and Ray's remote calls by direct ones.
"""

import functools
import importlib.abc
import importlib.machinery
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from reference import advantages as slow_advantages
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage


class CudaPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        # Without flash_attn.ops OpenRLHF computes log-probabilities with torch.
        if name.partition(".")[0] in ("deepspeed", "flash_attn", "vllm") and name != "flash_attn.ops":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, CudaPackages())
torch.compile = lambda function: function  # or the entropy would be compiled
from openrlhf.models import Actor  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ray.launcher import RayActorGroup  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor  # noqa: E402

Worker = PolicyModelActor.__ray_metadata__.modified_class
VOCABULARY = 11


@pytest.fixture(autouse=True)
def calls_are_direct(monkeypatch):
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    monkeypatch.setattr("torch.cuda.current_device", lambda: "cpu")


class Table(torch.nn.Module):
    """A language model whose logits are a table of the current token."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))

    def forward(self, input_ids, **kwargs):
        return CausalLMOutputWithPast(logits=self.logits[input_ids])


def arguments(estimator, gtpo=None, no_std_norm=False):
    return SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=no_std_norm),
            kl=SimpleNamespace(use_loss=False, init_coef=0),
            gtpo=SimpleNamespace(**({"completion_filter": "always"} if gtpo is None else gtpo)),
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=4, micro_batch_size=3),
        reward=SimpleNamespace(clip_range=(-10, 10)),
        train=SimpleNamespace(dynamic_batch_enable=False, colocate_all=False, colocate_actor_ref=False),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )


def make_maker(args, temperature=1.0):
    """An experience maker with two workers, which are called directly."""
    strategy = SimpleNamespace(args=args, ring_attn_group=None, is_rank_0=lambda: False)
    actor = Actor(Table(), temperature=temperature)
    actor.packing_samples = False
    group = RayActorGroup.__new__(RayActorGroup)
    group.duplicate_actors, group._actor_handlers = 1, []
    for _ in range(2):
        worker = Worker.__new__(Worker)
        worker.strategy, worker.actor = strategy, actor
        handle = SimpleNamespace(execute_batch=SimpleNamespace(remote=worker.execute_batch))
        group._actor_handlers.append(handle)
    tokenizer, no_kl = SimpleNamespace(pad_token_id=0), SimpleNamespace(value=0)
    return RemoteExperienceMaker(group, None, None, None, no_kl, strategy, tokenizer)


def make_rollouts(seed, prompts=3, n=4):
    """Samples as the generator hands them over: prompts and responses of unequal length, tool output in some."""
    generator = torch.Generator().manual_seed(seed)
    randint = functools.partial(torch.randint, generator=generator)
    rollouts = []
    for _ in range(prompts):
        prompt = randint(1, VOCABULARY, (int(randint(1, 5, ())),))
        for number in range(n):
            length = int(randint(1, 12, ()))
            sequences = torch.cat([prompt, randint(1, 4, (length,))]).unsqueeze(0)
            action_mask = torch.zeros(1, sequences.size(1) - 1, dtype=torch.int64)
            action_mask[:, len(prompt) - 1 :] = 1
            if number == 0:
                action_mask[:, len(prompt) : len(prompt) + 2] = 0
            reward = randint(0, 3, (1,)).float()
            mask = torch.ones_like(sequences)
            total = torch.tensor([float(sequences.size(1))])
            sample = Experience(sequences, mask, action_mask, rewards=reward, total_length=total)
            sample.response_length, sample.info = action_mask.sum(-1), {"reward": reward}
            rollouts.append(sample)
    return rollouts


def by_rollout(experiences, name):
    """What the experiences hold of each rollout, in the order of the rollouts."""
    found = {}
    for experience in experiences:
        found.update(zip(experience.index, getattr(experience, name), strict=True))
    return [found[number] for number in range(len(found))]


@pytest.mark.parametrize("no_std_norm", [False, True])
@pytest.mark.parametrize("gtpo", [{}, {"entropy_coeff": 0.3, "conflict_weight_negative": 0.2, "conflict_span": "all"}])
def test_advantages_are_bit_for_bit_those_of_the_whole_batch(gtpo, no_std_norm):
    gtpo = {"completion_filter": "always", **gtpo}
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        rollouts = make_rollouts(seed)
        for sample in rollouts:
            sample.kl = torch.zeros(sample.action_mask.shape)
            sample.entropy = torch.rand(sample.action_mask.shape, generator=generator) * 2 * torch.rand(1)
        rows = [
            (pad(sample.rewards, (0, sample.action_mask.size(1) - 1)), sample.action_mask[0])
            + (sample.sequences[0, 1:], sample.entropy[0])
            for sample in rollouts
        ]
        rewards, masks, responses, entropy = (
            pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True)
        )
        prompts = [number // 4 for number in range(12)]
        expected, _ = compute_gtpo_outcome_advantage(
            rewards, masks, prompts, responses, entropy, gtpo, norm_adv_by_std_in_grpo=not no_std_norm
        )

        maker = make_maker(arguments("gtpo", gtpo, no_std_norm))
        maker.split_rollout_samples(rollouts)  # numbers the samples
        shuffled = [rollouts[number] for number in torch.randperm(12, generator=generator)]
        micro_batches = [Experience.concat_experiences(shuffled[start : start + 5], 0) for start in (0, 5, 10)]
        found = maker.compute_advantages_and_returns(micro_batches)
        for row, advantages in enumerate(by_rollout(found, "advantages")):
            assert torch.equal(advantages, expected[row, : len(advantages)])
            assert not expected[row, len(advantages) :].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_from_rollouts_to_advantages_as_a_slow_reference_has_it(temperature):
    gtpo = {"completion_filter": "always", "entropy_threshold": 1.9 if temperature == 1 else 1.4}
    filtered = conflicts = 0
    for seed in range(10):
        rollouts = make_rollouts(seed)
        found = make_maker(arguments("gtpo", gtpo), temperature).make_experience_batch(rollouts)
        logits = Table().logits.detach() / temperature
        entropy_after = torch.distributions.Categorical(logits=logits).entropy()
        expected = slow_advantages(
            [sample.rewards.item() for sample in rollouts],
            [sample.action_mask[0].tolist() for sample in rollouts],
            [number // 4 for number in range(12)],
            [sample.sequences[0, 1:].tolist() for sample in rollouts],
            [entropy_after[sample.sequences[0, :-1]].tolist() for sample in rollouts],
            GTPOConfig(**gtpo),
            None,
            norm_by_std=True,
            epsilon=1e-6,
        )
        log_probs = by_rollout(found, "action_log_probs")
        for row, advantages in enumerate(by_rollout(found, "advantages")):
            torch.testing.assert_close(advantages[: len(expected[row])], torch.tensor(expected[row]))
            tokens = rollouts[row].sequences[0]
            own = logits.log_softmax(-1)[tokens[:-1], tokens[1:]] * rollouts[row].action_mask[0]
            torch.testing.assert_close(log_probs[row][: len(own)], own)
        kept = [any(row) for row in expected]
        filtered += kept.count(False)
        conflicts += sum(0 in row[-1:] for row, is_kept in zip(expected, kept, strict=True) if is_kept)
    assert 0 < filtered < 120 and conflicts > 0


def test_with_all_parts_off_the_experiences_are_those_of_dr_grpo():
    off = {"entropy_coeff": 0, "completion_filter": "never", "conflict_span": "none"}
    gtpo, dr_grpo = (
        make_maker(arguments(estimator, off, no_std_norm=True)).make_experience_batch(make_rollouts(seed=0))
        for estimator in ("gtpo", "dr_grpo")
    )
    masks = torch.cat(by_rollout(gtpo, "action_mask")).bool()  # dr_grpo has advantages between the tokens too
    for name in ("action_log_probs", "advantages", "returns"):
        assert torch.equal(torch.cat(by_rollout(gtpo, name))[masks], torch.cat(by_rollout(dr_grpo, name))[masks])


def test_experiences_can_be_balanced_and_split_after_it():
    args = arguments("gtpo")
    args.actor = SimpleNamespace(num_nodes=1, num_gpus_per_node=2)
    experiences = make_maker(args).make_experience_batch(make_rollouts(seed=0))
    balanced = balance_experiences(experiences, args)
    assert sum(len(experience.advantages) for experience in balanced) == 12


class Trained(Exception):
    pass


def start(monkeypatch, *options):
    """Parse a command line of train_ppo_ray; stops where training would begin."""
    common = [
        "--actor.model_name_or_path",
        "model",
        "--reward.remote_url",
        "url",
        "--rollout.n_samples_per_prompt",
        "8",
    ]
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", "--algo.advantage.estimator", "gtpo", *common, *options])
    monkeypatch.setattr("ray.is_initialized", MagicMock(side_effect=Trained))
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


def test_command_line_starts_with_and_without_settings(monkeypatch):
    for options in (
        [],
        ["--algo.gtpo", '{"completion_filter": "auto", "initial_entropy": 0.4, "entropy_coeff": 0.01}'],
    ):
        with pytest.raises(Trained):
            start(monkeypatch, "--algo.kl.init_coef", "0", *options)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--algo.kl.init_coef", "0", "--algo.gtpo", '{"entropy_coef": 1}'], "did you mean entropy_coeff"),
        (["--algo.kl.init_coef", "0", "--algo.gtpo", '{"completion_filter": "auto"}'], "rests on the initial entropy"),
        ([], "set --algo.kl.init_coef 0"),
        (["--algo.kl.init_coef", "0", "--rollout.n_samples_per_prompt", "1"], "n_samples_per_prompt > 1"),
    ],
)
def test_wrong_settings_are_errors_before_anything_starts(monkeypatch, options, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        start(monkeypatch, *options)
