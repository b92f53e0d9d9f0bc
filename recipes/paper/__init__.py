"""The experiments of the GTPO paper (arXiv:2508.03772): prompt, data, evaluation, figures."""
