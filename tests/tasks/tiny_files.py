"""Small files in the formats that models come in, made without torch."""

import json
import random
import struct


def safetensors(sizes: dict[str, int]) -> bytes:
    """A safetensors file with a one-dimensional U8 tensor of each size (bytes), filled with noise."""
    header, start = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + random.Random(0).randbytes(start)
