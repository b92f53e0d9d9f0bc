"""The experiments of the GTPO paper (arXiv:2508.03772): data, reward, evaluation, figures, launcher of the recipes."""
