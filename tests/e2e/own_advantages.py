"""A V1 trainer with advantages of its own, as papers bring them: `trainer.v1.trainer_mode=own`."""

import wrapt


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_sync")
def _register(trainer_sync):
    class OwnTrainer(trainer_sync.PPOTrainerSync):
        def _compute_advantage(self, batch, metrics):
            return batch

    trainer_sync.register_trainer("own")(OwnTrainer)
