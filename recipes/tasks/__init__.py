"""Models and questions for a CPU."""
