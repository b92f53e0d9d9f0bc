"""GTPO (arXiv:2508.03772) against GRPO at equal settings, in verl's trainer on CPU; see docs/study.md."""
