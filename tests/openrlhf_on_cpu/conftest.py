from importlib.util import find_spec

# scripts/check_openrlhf.sh runs these in an environment of their own.
collect_ignore_glob = [] if find_spec("openrlhf") else ["test_*.py"]
