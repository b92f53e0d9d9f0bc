"""What users type on their own commands and files: `gtpo-verl check`, `diagnose`, `view`, `initial-entropy`."""
