"""V1 trainers with advantages or updates of their own, as papers bring them: `trainer.v1.trainer_mode=NAME`."""

import wrapt


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_sync")
def _register(trainer_sync):
    import transfer_queue as tq
    from tensordict import TensorDict
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    def put_rewards(batch):
        """Put the rewards where verl's update reads advantages."""
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        rewards = tq.kv_batch_get(**where, select_fields=["rm_scores"])["rm_scores"]
        fields = {"advantages": rewards, "returns": rewards}
        return tq.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch.keys)))

    class Own(trainer_sync.PPOTrainerSync):
        """It has advantages and an update of its own."""

        def _compute_advantage(self, batch, metrics):
            return put_rewards(batch)

        def _update_actor(self, batch, metrics):
            size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
            batch.extra_info |= {"calculate_entropy": False, "distillation_use_topk": False, "epochs": 1, "seed": 1}
            batch.extra_info |= {"distillation_only": False, "global_batch_size": size, "mini_batch_size": size}
            batch.extra_info |= {"dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
            output = self.actor_rollout_wg.update_actor(batch)
            metrics.update(reduce_metrics(rename_dict(output["metrics"], "actor/")))
            return batch

    class WritesOver(trainer_sync.PPOTrainerSync):
        """It asks for verl's advantages, and writes others over them."""

        def _compute_advantage(self, batch, metrics):
            return put_rewards(super()._compute_advantage(batch, metrics))

    class Renames(trainer_sync.PPOTrainerSync):
        """It has advantages of its own, and logs verl's update under names of its own."""

        def _compute_advantage(self, batch, metrics):
            return put_rewards(batch)

        def _update_actor(self, batch, metrics):
            logged = {}
            batch = super()._update_actor(batch, logged)
            metrics.update({name.replace("actor/", "policy/"): value for name, value in logged.items()})
            return batch

    class UpdatesTwice(trainer_sync.PPOTrainerSync):
        """It updates with the whole batch once more."""

        def _compute_metrics(self, batch, metrics, *args, **kwargs):
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            self._update_actor(batch, metrics)
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            metrics["own/updates"] = 2

    trainers = {"own": Own, "writes_over": WritesOver, "renames": Renames, "updates_twice": UpdatesTwice}
    for name, trainer in trainers.items():
        trainer_sync.register_trainer(name)(trainer)
