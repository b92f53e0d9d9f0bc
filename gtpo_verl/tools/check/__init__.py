"""`gtpo-verl check` and `GTPO_CHECK`: is GTPO hooked into verl, and would a run start?"""
