"""The clone's own programs, which make this project's evidence and run its recipes; they are not installed.

`paper` has the paper's data, evaluation and figures, `runs` starts and watches verl's trainers, `tasks` makes models
and questions for a CPU, and `verl_cpu` runs verl without an accelerator. `gtpo_verl` imports none of it.
"""
