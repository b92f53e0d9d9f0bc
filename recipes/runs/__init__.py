"""Starting, trying and exporting runs of verl."""
