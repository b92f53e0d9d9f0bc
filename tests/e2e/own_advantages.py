"""A V1 trainer with advantages and an update of its own, as papers bring them: `trainer.v1.trainer_mode=own`."""

import wrapt


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_sync")
def _register(trainer_sync):
    import transfer_queue as tq
    from tensordict import TensorDict
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    class OwnTrainer(trainer_sync.PPOTrainerSync):
        def _compute_advantage(self, batch, metrics):
            where = {"keys": batch.keys, "partition_id": batch.partition_id}
            rewards = tq.kv_batch_get(**where, select_fields=["rm_scores"])["rm_scores"]
            fields = {"advantages": rewards, "returns": rewards}
            return tq.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch.keys)))

        def _update_actor(self, batch, metrics):
            size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
            batch.extra_info |= {"calculate_entropy": False, "distillation_use_topk": False, "epochs": 1, "seed": 1}
            batch.extra_info |= {"distillation_only": False, "global_batch_size": size, "mini_batch_size": size}
            batch.extra_info |= {"dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
            output = self.actor_rollout_wg.update_actor(batch)
            metrics.update(reduce_metrics(rename_dict(output["metrics"], "actor/")))
            return batch

    trainer_sync.register_trainer("own")(OwnTrainer)
