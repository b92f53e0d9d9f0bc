"""`python -m gtpo_verl.openrlhf` is `openrlhf.cli.train_ppo_ray` with the estimator `gtpo`."""

from gtpo_verl.openrlhf.command import main

if __name__ == "__main__":
    main()
