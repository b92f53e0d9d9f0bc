"""The mathematics of GTPO (arXiv:2508.03772), as functions of tensors: nothing here knows a trainer."""
