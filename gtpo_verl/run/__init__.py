"""A run of GTPO under any trainer: what it keeps from rollout to rollout, and the files that it leaves."""
