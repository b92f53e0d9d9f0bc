"""The advantages of a rollout in OpenRLHF's micro-batches; two helpers stand in for OpenRLHF."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from gtpo_verl import GTPOConfig, compute_gtpo, compute_gtpo_token_advantages
from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.openrlhf.options import OpenRLHFGTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy

GROUPS, SIZE, LENGTH, PROMPT = 3, 4, 9, 2


def zero_pad_sequences(sequences, side):
    assert side == "right"
    width = max(x.size(-1) for x in sequences)
    return torch.cat([pad(x, (0, width - x.size(-1))) for x in sequences])


@pytest.fixture
def stage(monkeypatch):
    """The module `gtpo_verl.openrlhf.stage`, without OpenRLHF and without Ray's processes."""
    for name, content in {
        "openrlhf": {},
        "openrlhf.utils": {},
        "openrlhf.utils.logging_utils": {"init_logger": lambda name: None},
        "openrlhf.utils.utils": {"zero_pad_sequences": zero_pad_sequences},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module("gtpo_verl.openrlhf.stage")
    monkeypatch.delitem(sys.modules, "gtpo_verl.openrlhf.stage")
    monkeypatch.setattr(module.ray, "get", lambda refs: refs)
    return module


@pytest.fixture
def batch():
    """A rollout: rows of a prompt and a completion each, of different lengths, the groups one after another."""
    torch.manual_seed(0)
    rows = GROUPS * SIZE
    lengths = torch.randint(3, LENGTH - PROMPT, (rows,))
    at = torch.arange(1, LENGTH)
    return {
        "sequences": torch.randint(5, 8, (rows, LENGTH)),
        "action_mask": (at >= PROMPT) & (at < PROMPT + lengths[:, None]),
        "rewards": torch.randint(0, 3, (rows,)).float(),
        "entropy": torch.rand(rows, LENGTH - 1),
        "truncated": torch.rand(rows) < 0.5,
        "action_log_probs": -torch.rand(rows, LENGTH - 1),
    }


class Trainer:
    """As much of OpenRLHF's as the stage uses; every micro-batch is computed by `duplicates` ranks."""

    def __init__(self, batch, folder, config, order, sizes, duplicates=1, norm_by_std=True):
        self.args = SimpleNamespace(
            algo=SimpleNamespace(
                gtpo=OpenRLHFGTPOConfig(**config), advantage=SimpleNamespace(no_std_norm=not norm_by_std)
            ),
            ckpt=SimpleNamespace(path=str(folder)),
            ds=SimpleNamespace(ring_attn_size=duplicates, tensor_parallel_size=1),
            rollout=SimpleNamespace(n_samples_per_prompt=SIZE),
        )
        self.experience_maker = SimpleNamespace(compute_advantages_and_returns=lambda experiences: experiences)
        self.actor_model_group = self
        self.duplicates = duplicates
        self.experiences = []
        for rows in torch.tensor(order).split(sizes):
            # What OpenRLHF makes of a micro-batch: as wide as its longest row.
            width = int(batch["action_mask"][rows].nonzero()[:, 1].max()) + 1
            one = {name: values[rows] for name, values in batch.items()}
            one |= {"sequences": one["sequences"][:, : width + 1]}
            one |= {name: one[name][:, :width] for name in ("action_mask", "entropy", "action_log_probs")}
            self.experiences.append(SimpleNamespace(**one, index=rows.tolist()))

    def async_run_method_batch(self, method_name, number):
        assert method_name == "take_gtpo_entropy" and number == list(range(len(self.experiences)))
        ranks = [[x.entropy] for x in self.experiences]
        return [result for result in ranks for _ in range(self.duplicates)]

    def compute(self):
        return self.experience_maker.compute_advantages_and_returns(self.experiences)


IN_ORDER = {"order": list(range(GROUPS * SIZE)), "sizes": [4, 4, 4]}
SHUFFLED = {"order": [7, 2, 11, 0, 5, 9, 1, 3, 10, 4, 8, 6], "sizes": [5, 1, 6]}


@pytest.mark.parametrize("micro_batches", [IN_ORDER, SHUFFLED | {"duplicates": 2}], ids=["in order", "shuffled"])
@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("least", [None, 2])
def test_advantages_of_micro_batches_are_those_of_the_whole_rollout(
    stage, batch, tmp_path, micro_batches, norm_by_std, least
):
    config = {"completion_filter": "always", "entropy_threshold": 0.5}
    settings = config | {"min_correct_reward": least}
    trainer = Trainer(batch, tmp_path, settings, norm_by_std=norm_by_std, **micro_batches)
    made = stage.GTPOStage(trainer, resumed=False)
    index = [row // SIZE for row in range(GROUPS * SIZE)]
    mask = batch["action_mask"]
    expected = compute_gtpo_token_advantages(
        compute_group_advantages(batch["rewards"], Completions(mask, index), norm_by_std, min_correct_reward=least),
        index,
        batch["sequences"][:, 1:],
        mask,
        batch["entropy"],
        config,
    )
    assert len(expected.conflicts.rows) and not expected.keep.all(), "nothing to see"
    for experience in trainer.compute():
        width = experience.action_mask.size(1)
        torch.testing.assert_close(
            experience.advantages, expected.advantages[experience.index, :width], rtol=0, atol=1e-7
        )
        assert experience.returns.equal(experience.advantages)
    assert made.metrics["gtpo/filter/dropped_frac"] == pytest.approx((~expected.keep).float().mean().item())


def by_log_probs(response_mask, old_log_probs, entropy, advantages):
    return response_mask * (old_log_probs.exp() + entropy + advantages.unsqueeze(-1))


def test_lambda_of_ones_own_gets_log_probs_and_entropies_of_the_whole_rollout(stage, batch, tmp_path):
    config = {"completion_filter": "never", "token_weights": f"pkg://{__name__}.by_log_probs"}
    trainer = Trainer(batch, tmp_path, config, **SHUFFLED)
    made = stage.GTPOStage(trainer, resumed=False)
    expected = compute_gtpo(
        rewards=batch["rewards"],
        responses=batch["sequences"][:, 1:],
        response_mask=batch["action_mask"],
        group_ids=torch.arange(GROUPS * SIZE) // SIZE,
        entropy=batch["entropy"],
        old_log_probs=batch["action_log_probs"],
        config=config,
    ).advantages
    assert (expected != 0).any()
    for experience in trainer.compute():
        width = experience.action_mask.size(1)
        torch.testing.assert_close(experience.advantages, expected[experience.index, :width])
    assert made.metrics["gtpo/lambda/mean"] != 1


def test_a_reward_at_the_mean_of_its_group_has_no_sign(stage, batch, tmp_path):
    """In float32 the mean of 0.1, 0.2, 0.3 and 0.2 is not 0.2."""
    batch["rewards"] = torch.tensor([0.1, 0.2, 0.3, 0.2] * GROUPS)
    trainer = Trainer(batch, tmp_path, {"entropy_coeff": 0, "completion_filter": "never"}, **IN_ORDER)
    stage.GTPOStage(trainer, resumed=False)
    has_sign = [experience.advantages.any(-1).tolist() for experience in trainer.compute()]
    assert has_sign == [[True, False, True, False]] * len(has_sign) != []


def test_rollouts_without_signal_are_told_and_an_empty_filter_ends_the_run(stage, batch, tmp_path, caplog):
    batch["rewards"].fill_(1.0)
    settings = {"completion_filter": "always", "entropy_threshold": 1e-6, "min_correct_reward": 2}
    trainer = Trainer(batch, tmp_path, settings, **IN_ORDER)
    stage.GTPOStage(trainer, resumed=False)
    for _ in range(19):
        trainer.compute()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("equal rewards" in message for message in warnings) == 2
    assert sum("algo.gtpo.completion_filter=never" in message for message in warnings) == 1
    with pytest.raises(ValueError, match=r"20 batches.*algo\.gtpo\.completion_filter=never"):
        trainer.compute()


def test_initial_entropy_is_that_of_the_first_rollout_and_is_kept(stage, batch, tmp_path, caplog):
    """On three prompts, and not far from the threshold: there is a warning."""
    trainer = Trainer(batch, tmp_path, {}, **IN_ORDER)
    made = stage.GTPOStage(trainer, resumed=False)
    trainer.compute()
    record = InitialEntropy.load(tmp_path)
    assert (record.completions, record.prompts) == (GROUPS * SIZE, GROUPS)
    for experience in trainer.experiences:
        experience.entropy /= 2
    trainer.compute()
    assert made.metrics["gtpo/entropy/initial"] == record.value > made.metrics["gtpo/entropy/mean"]
    assert InitialEntropy.load(tmp_path) == record
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and "filter on: " in warning.getMessage()
    assert "algo.gtpo.initial_entropy" in warning.getMessage()


def test_resumed_run_without_its_record_is_an_error(stage, batch, tmp_path):
    with pytest.raises(ValueError, match=r"gtpo_initial_entropy\.json .*missing"):
        stage.GTPOStage(Trainer(batch, tmp_path, {}, **IN_ORDER), resumed=True)


@pytest.mark.parametrize("resumed", [True, False])
def test_known_initial_entropy_is_not_measured(stage, batch, tmp_path, resumed, caplog):
    if resumed:
        InitialEntropy(0.9).save(tmp_path, GTPOConfig())
    trainer = Trainer(batch, tmp_path, {} if resumed else {"initial_entropy": 0.9}, **IN_ORDER)
    made = stage.GTPOStage(trainer, resumed)
    trainer.compute()
    assert (made.metrics["gtpo/entropy/initial"], made.metrics["gtpo/filter/active"]) == (0.9, 0)
    assert InitialEntropy.load(tmp_path).value == 0.9
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
