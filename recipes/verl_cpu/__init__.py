"""verl without an accelerator: verl loads `plugin`, which registers the other modules; tests use the rest."""
