"""verl without an accelerator: verl loads `plugin`, which registers the rest; configs name `gloo_checkpoint_engine`."""
