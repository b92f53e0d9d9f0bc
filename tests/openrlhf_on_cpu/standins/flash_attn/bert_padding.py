from flash_attn import unavailable

index_first_axis = pad_input = rearrange = unpad_input = unavailable
