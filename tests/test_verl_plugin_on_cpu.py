import subprocess
import sys
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

import gtpo_verl.__main__
from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage, verl_plugin
from gtpo_verl.initial_entropy import InitialEntropy

LENGTHS = [5, 4, 3, 5, 1, 6]  # the fifth row is verl's padding
UIDS = ["p", "p", "q", "p", "pad0f", "q"]
SCORES = [20.0, 10.0, 1.0, 10.0, 0.0, 20.0]


@pytest.fixture
def rows():
    """Rows as TransferQueue holds them after the old-log-prob pass: jagged, with a padding row among them."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.ones(n, dtype=torch.int64) for n in LENGTHS]
    masks[4] = torch.zeros(1, dtype=torch.int64)
    scores = [torch.zeros(n) for n in LENGTHS]
    for score, reward in zip(scores, SCORES, strict=True):
        score[-1] = reward
    return {
        "uid": UIDS,
        "responses": [torch.randint(1, 4, (n,), generator=generator) for n in LENGTHS],
        "response_mask": masks,
        "rm_scores": scores,
        "entropy": [torch.rand(n, generator=generator) for n in LENGTHS],
        "old_log_probs": [-torch.rand(n, generator=generator) for n in LENGTHS],
    }


class InMemoryQueue:
    """The two calls of TransferQueue that the advantage stage makes."""

    def __init__(self, rows):
        self.rows = rows
        self.put = {}

    def kv_batch_get(self, keys, partition_id, select_fields):
        data = {}
        for field in set(select_fields) & set(self.rows):
            values = [self.rows[field][int(key.rsplit("_", 2)[1])] for key in keys]
            data[field] = (
                np.array(values) if field == "uid" else torch.nested.as_nested_tensor(values, layout=torch.jagged)
            )
        uid = data.pop("uid", None)
        batch = TensorDict(data, batch_size=len(keys))
        if uid is not None:
            batch["uid"] = uid.tolist()
        return batch

    def kv_batch_put(self, keys, partition_id, fields):
        self.put = {field: fields[field].to_padded_tensor(0.0) for field in fields.keys()}
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{}] * len(keys))


@pytest.fixture
def trainer(compose_config):
    """verl's sync trainer without its workers."""

    def made(*overrides, global_steps=1):
        trainer = PPOTrainerSync.__new__(PPOTrainerSync)
        trainer.config = compose_config("data.max_response_length=6", *overrides)
        trainer.global_steps = global_steps
        return trainer

    return made


def step(trainer, rows, monkeypatch, order=range(6)):
    """One call of the trainer's advantage stage; the metrics, and advantages in the rows' own order."""
    queue = InMemoryQueue(rows)
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys = [f"{UIDS[i]}_{i}_0" for i in order]
    metrics = {}
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 6), metrics=metrics)
    advantages = torch.empty(6, queue.put["advantages"].shape[1])
    advantages[list(order)] = queue.put["advantages"]
    return metrics, advantages


def padded(rows, field):
    return torch.nn.utils.rnn.pad_sequence(rows[field], batch_first=True)


def expected(rows, **kwargs):
    arguments = {k: padded(rows, k) for k in ("response_mask", "responses", "entropy")}
    return compute_gtpo_outcome_advantage(padded(rows, "rm_scores"), index=np.array(UIDS), **arguments, **kwargs)[0]


def real_mean_entropy(rows):
    return torch.stack([e.mean() for i, e in enumerate(rows["entropy"]) if i != 4]).mean().item()


@pytest.mark.parametrize("order", [range(6), [4, 2, 0, 5, 1, 3]])
def test_v1_trainer_gets_the_advantages_of_the_bare_function(trainer, rows, monkeypatch, order):
    metrics, advantages = step(trainer(), rows, monkeypatch, order)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=initial_entropy))
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/group/size_min"] == 2
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert metrics["timing_s/gtpo"] > 0


def test_settings_reach_the_estimator(trainer, rows, monkeypatch):
    overrides = ["algorithm.gtpo.entropy_coeff=0.7", "+algorithm.gtpo.conflict_span=all"]
    gtpo = trainer(*overrides, "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.gtpo.initial_entropy=0.3")
    _, advantages = step(gtpo, rows, monkeypatch)
    config = GTPOConfig(entropy_coeff=0.7, conflict_span="all", initial_entropy=0.3)
    torch.testing.assert_close(advantages, expected(rows, config=config, norm_adv_by_std_in_grpo=False))


def test_initial_entropy_is_measured_once_and_written(trainer, rows, monkeypatch, compose_config):
    gtpo = trainer()
    first, _ = step(gtpo, rows, monkeypatch)
    rows["entropy"] = [e + 0.5 for e in rows["entropy"]]
    second, _ = step(gtpo, rows, monkeypatch)
    assert second["gtpo/entropy/initial"] == first["gtpo/entropy/initial"] < second["gtpo/entropy/mean"]
    record = InitialEntropy.load(gtpo.config.trainer.default_local_dir)
    assert record.value == first["gtpo/entropy/initial"] and (record.completions, record.prompts) == (5, 2)


def test_resumed_run_reads_the_record_and_does_not_measure(trainer, rows, monkeypatch):
    gtpo = trainer(global_steps=9)
    InitialEntropy(0.123).save(gtpo.config.trainer.default_local_dir)
    assert step(gtpo, rows, monkeypatch)[0]["gtpo/entropy/initial"] == 0.123
    gtpo = trainer("trainer.default_local_dir=/nowhere", global_steps=9)
    with pytest.raises(ValueError, match="algorithm.gtpo.initial_entropy"):
        step(gtpo, rows, monkeypatch)


def test_resumed_run_without_record_needs_none_where_the_filter_does_not_rest_on_it(
    trainer, rows, monkeypatch, tmp_path
):
    gtpo = trainer(
        f"trainer.default_local_dir={tmp_path / 'none'}", "algorithm.gtpo.completion_filter=on", global_steps=9
    )
    metrics, _ = step(gtpo, rows, monkeypatch)
    assert "gtpo/entropy/initial" not in metrics and metrics["gtpo/filter/active"] == 1


def test_missing_entropy_is_an_error_and_not_a_zero(trainer, rows, monkeypatch):
    del rows["entropy"]
    with pytest.raises(RuntimeError, match="GTPO needs entropy"):
        step(trainer(), rows, monkeypatch)


def test_grpo_in_the_same_process_is_verls(trainer, rows, monkeypatch):
    del rows["entropy"]
    metrics, advantages = step(trainer("algorithm.adv_estimator=grpo"), rows, monkeypatch)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(
        padded(rows, "rm_scores"), padded(rows, "response_mask"), np.array(UIDS)
    )
    torch.testing.assert_close(advantages, grpo)
    assert not any(key.startswith("gtpo/") for key in metrics)


def test_through_verls_compute_advantage(trainer, rows):
    """With what the data-proto stage collected, and never with what an earlier batch left."""
    stage = verl_plugin.GTPOStage.of(trainer("algorithm.gtpo.initial_entropy=0.3"))
    fields = {k: padded(rows, k) for k in ("responses", "entropy", "response_mask")}
    stage.collect(**fields, row_len=torch.tensor(LENGTHS))
    tensors = {"token_level_rewards": padded(rows, "rm_scores"), "response_mask": fields["response_mask"]}
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(UIDS, dtype=object)})
    algorithm = SimpleNamespace()
    result = compute_advantage(data, adv_estimator="gtpo", config=algorithm)
    torch.testing.assert_close(result.batch["advantages"], expected(rows, initial_entropy=0.3))
    with pytest.raises(RuntimeError, match="without token ids and entropy"):
        compute_advantage(data, adv_estimator="gtpo", config=algorithm)


def test_legacy_trainer_gets_the_same_advantages_and_logs_the_metrics(rows, compose_config, monkeypatch):
    """`fit` of verl's legacy trainer calls these three in this order, on padded batches."""
    trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
    trainer.config, trainer.global_steps = compose_config("data.max_response_length=6"), 1
    prompt = torch.ones(6, 2, dtype=torch.int64)
    columns = torch.arange(6)
    response_mask = padded(rows, "response_mask")
    tensors = {
        "responses": padded(rows, "responses"),
        "response_mask": response_mask,
        "prompts": prompt,
        "attention_mask": torch.cat([prompt, (columns < torch.tensor(LENGTHS).unsqueeze(-1)).long()], -1),
    }
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(UIDS, dtype=object)})
    old_log_prob = DataProto.from_dict({"entropys": padded(rows, "entropy"), "old_log_probs": -torch.rand(6, 6)})
    monkeypatch.setattr(
        ray_trainer.RayPPOTrainer, "_compute_old_log_prob", hooked(lambda self, batch: (old_log_prob, 0))
    )
    trainer._compute_old_log_prob(data)
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] = padded(rows, "rm_scores")
    data = compute_advantage(data, adv_estimator="gtpo", config=trainer.config.algorithm)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(data.batch["advantages"], expected(rows, initial_entropy=initial_entropy))

    metrics = ray_trainer.compute_data_metrics(batch=data, use_critic=False)
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert "critic/score/mean" in metrics and metrics["timing_s/gtpo"] > 0
    assert "gtpo/entropy/initial" not in ray_trainer.compute_data_metrics(batch=data, use_critic=False)


def hooked(function):
    """The plugin's hook around another function than verl's, which would need workers."""
    module = SimpleNamespace(
        __name__="verl.trainer.ppo.ray_trainer",
        RayPPOTrainer=type("RayPPOTrainer", (), {"_compute_old_log_prob": function}),
        compute_data_metrics=ray_trainer.compute_data_metrics,
    )
    verl_plugin._hook_legacy_trainer(module)
    return module.RayPPOTrainer._compute_old_log_prob


def test_rejected_tokens_keep_their_position_and_get_no_advantage(trainer, rows):
    """verl's rollout correction zeroes the mask of rejected tokens after the batch was collected."""
    stage = verl_plugin.GTPOStage.of(trainer("algorithm.gtpo.initial_entropy=0.3"))
    fields = {k: padded(rows, k) for k in ("responses", "entropy", "response_mask")}
    stage.collect(**fields, row_len=torch.tensor(LENGTHS))
    kept = fields["response_mask"].clone()
    kept[0, 0] = 0
    advantages, _ = stage.estimate(padded(rows, "rm_scores"), kept, np.array(UIDS))
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=0.3) * kept)


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_importing_verl_registers_gtpo_through_the_entry_point_alone():
    code = """
import verl
from verl.trainer.ppo import core_algos, ray_trainer
print(core_algos.get_adv_estimator_fn("gtpo").__module__, core_algos.get_policy_loss_fn("gtpo").__module__)
"""
    assert run_python(code) == "gtpo_verl.verl_plugin gtpo_verl.loss"


def test_importing_verl_does_not_import_the_trainer():
    assert run_python("import verl, sys; print('verl.trainer.ppo.core_algos' in sys.modules)") == "False"


def test_gtpo_is_registered_in_a_ray_worker():
    @ray.remote
    def loss_module():
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        return get_policy_loss_fn("gtpo").__module__

    ray.init(num_cpus=1, include_dashboard=False, ignore_reinit_error=True)
    try:
        assert ray.get(loss_module.remote(), timeout=120) == "gtpo_verl.loss"
    finally:
        ray.shutdown()


def test_a_name_that_is_taken_is_a_clear_error():
    code = """
import os; os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
from verl.trainer.ppo import core_algos, ray_trainer
@core_algos.register_adv_est("gtpo")
def group_turn_policy_optimization(**kwargs): ...
from gtpo_verl import verl_plugin
assert core_algos.get_adv_estimator_fn("gtpo") is group_turn_policy_optimization
try:
    verl_plugin._raise_problems()
except RuntimeError as error:
    print(error)
"""
    message = run_python(code)
    assert "__main__.group_turn_policy_optimization" in message and "uninstall one" in message


@pytest.fixture
def fresh_problems(monkeypatch):
    monkeypatch.setattr(verl_plugin, "_problems", [])


def test_unsupported_verl_is_a_clear_error_once_gtpo_is_asked_for(compose_config, monkeypatch, fresh_problems):
    monkeypatch.setattr(verl_plugin, "version", lambda name: "0.6.0")
    monkeypatch.setattr(verl_plugin.wrapt, "register_post_import_hook", lambda *args: None)
    verl_plugin._install()
    assert f"supports verl {', '.join(verl_plugin.SUPPORTED_VERL)}; this is 0.6.0" in verl_plugin.problems()[0]
    from verl.utils.config import validate_config

    with pytest.raises(RuntimeError, match="GTPO cannot run.*0.6.0"):
        validate_config(config=compose_config(), use_reference_policy=False, use_critic=False)
    validate_config(config=compose_config("algorithm.adv_estimator=grpo"), use_reference_policy=False, use_critic=False)


def test_plugin_steps_back_for_a_verl_that_has_gtpo(compose_config, monkeypatch, fresh_problems, capsys):
    def verls_own(**kwargs): ...

    estimators, losses = {"gtpo": verls_own}, {"gtpo": verls_own}
    members = Enum("AdvantageEstimator", {"GTPO": "gtpo"})
    patched = SimpleNamespace(
        AdvantageEstimator=members, ADV_ESTIMATOR_REGISTRY=estimators, POLICY_LOSS_REGISTRY=losses
    )
    verl_plugin._register(patched)
    assert verl_plugin.problems() == [] and estimators == losses == {"gtpo": verls_own}

    monkeypatch.setattr(core_algos, "AdvantageEstimator", members)
    from verl.utils.config import validate_config

    validate_config(config=compose_config("+algorithm.gtpo.unknown=1"), use_reference_policy=False, use_critic=False)
    assert gtpo_verl.__main__.main() == 0
    assert "it serves gtpo, and the plugin steps back" in capsys.readouterr().out


def test_hook_that_does_not_fit_is_a_problem_and_not_a_crash(fresh_problems):
    verl_plugin._hook_v1_trainer(SimpleNamespace(__name__="verl.trainer.ppo.v1.trainer_base", PPOTrainer=object))
    assert "has no verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in verl_plugin.problems()[0]


def test_report_says_what_is_registered_where(capsys, monkeypatch):
    assert gtpo_verl.__main__.main() == 0
    out = capsys.readouterr().out
    assert "advantage estimator gtpo: gtpo_verl.verl_plugin.estimate_gtpo_advantage" in out
    assert "hook on V1 trainer: yes" in out and "gtpo = gtpo_verl.verl_plugin" in out
    monkeypatch.setattr(verl_plugin, "_problems", ["the sky has fallen"])
    assert gtpo_verl.__main__.main() == 1
    assert "problem: the sky has fallen" in capsys.readouterr().out
