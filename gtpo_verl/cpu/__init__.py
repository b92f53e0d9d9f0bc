"""verl without an accelerator: `VERL_PLATFORM=cpu` switches it on, `rollout.name=hf` generates with transformers."""
