"""The files that a run leaves beside its checkpoints, and how they are written and read."""
