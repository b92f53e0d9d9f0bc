"""Completions that a run left, whatever wrote them: `sources` reads them, and `tokens` says what their tokens spell."""
