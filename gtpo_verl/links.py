"""Where messages send their readers."""

DOCS = "https://github.com/gtpo-verl/gtpo-verl/blob/main/docs"
