"""Numbers about a data set, and its semantic digest."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3

from mca_lib.data.token_store import TokenStore

_BLOCK = 1 << 22


def split_statistics(store: TokenStore, cutoff_len: int, *, pairs: bool = False) -> dict[str, Any]:
    """Counts of one split; `fill` is the share of rows × cutoff_len that is tokens, of rows of pairs × 2 cutoff_len."""
    capacity = cutoff_len * (2 if pairs else 1)
    lengths = store.document_lengths
    quantiles = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        "rows": len(store),
        "documents": store.num_documents,
        **({"pairs": store.num_documents // 2} if pairs else {}),
        **({"images": len(store.images.arrays["image_files"])} if store.images is not None else {}),
        "tokens": store.num_tokens,
        "loss_tokens": store.num_loss_tokens,
        "fill": round(store.num_tokens / (len(store) * capacity), 6),
        "document_length": {name: int(np.quantile(lengths, q, method="higher")) for name, q in quantiles.items()},
        "largest_id": int(store.tokens_T.max()),
    }


def split_digest(store: TokenStore, *, pairs: bool = False) -> str:
    """BLAKE3 over tokens, masks and boundaries: what the rows mean, not how a file's header looks."""
    hasher = blake3(b"pairs" if pairs else b"")
    for name, array in store.arrays.items():
        hasher.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode("ascii"))
        for start in range(0, len(array), _BLOCK):
            hasher.update(np.ascontiguousarray(array[start : start + _BLOCK]).tobytes())
    return hasher.hexdigest()


def dataset_digest(parts: Mapping[str, str]) -> str:
    """One digest over the digests of all splits."""
    return blake3(json.dumps(parts, sort_keys=True).encode("ascii")).hexdigest()
