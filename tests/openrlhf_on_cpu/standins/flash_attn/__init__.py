"""The names that OpenRLHF imports from flash-attn, which needs CUDA; packing and ring attention alone call them."""


def unavailable(*args, **kwargs):
    raise NotImplementedError("flash-attn is a stand-in here: no packing, no ring attention")
