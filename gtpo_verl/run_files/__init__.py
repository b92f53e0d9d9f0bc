"""What a run has whatever trains it: GTPO in it, the files it leaves, the text of its tokens."""
