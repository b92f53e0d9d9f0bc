from flash_attn import unavailable as all_gather  # noqa: F401
