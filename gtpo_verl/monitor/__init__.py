"""What goes wrong in a run, whatever trains it: the numbers that trainers log, and the signs in them. No torch."""
