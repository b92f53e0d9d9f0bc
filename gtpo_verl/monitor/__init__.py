"""Whether a run is healthy, whatever trains it: the numbers that trainers log, a verdict, and what moved. No torch."""
