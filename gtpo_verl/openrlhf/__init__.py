"""GTPO (arXiv:2508.03772) in OpenRLHF, as it is installed: its own trainer, with one more advantage estimator.

    gtpo-verl openrlhf --algo.advantage.estimator gtpo --algo.kl.init_coef 0 <options of train_ppo_ray>

`command` runs `openrlhf.cli.train_ppo_ray`; `options` reads and checks its command line; `ray_actors` is what changes
in its classes once `gtpo` is chosen; `stage` computes the advantages. Nothing changes without `gtpo`.
"""
