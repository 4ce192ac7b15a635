"""Is a checkpoint whole, and of the model that its config describes? No Megatron, and no weights are read."""

from pathlib import Path

from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.converter.plan import entries
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import stored_key

WEIGHTS_FOLDER = "model"
"""Folder of the torch_dist checkpoint within an MCA checkpoint directory."""


def verify_model(directory: str | Path, config: McaModelConfig) -> CheckpointReader:
    """Check names, shapes and file sizes against the config, without reading weights; returns the open checkpoint.

    Raises:
        CheckpointError: lists what is missing, unexpected or of another shape.
    """
    reader = CheckpointReader(directory)
    expected = expected_shapes(config)
    found = {key: tuple(meta.size) for key, meta in reader.stored.items()}
    problems = [f"{k} is missing" for k in expected if k not in found]
    problems += [f"{k} is not part of the model" for k in found if k not in expected]
    problems += [
        f"{k} has shape {list(found[k])}, expected {list(s)}" for k, s in expected.items() if found.get(k, s) != s
    ]
    if problems:
        raise CheckpointError(f"{directory}: of another model: {'; '.join(problems[:8])} ({len(problems)} in all)")
    return reader


def expected_shapes(config: McaModelConfig) -> dict[str, tuple[int, ...]]:
    """Stored key → shape, for a model of this config; layers and experts are leading axes."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, list[int]] = {}
    for entry in entries(config):
        key, index = stored_key(entry.mca, config.stacked_layers)
        for part, shape in entry.mapping.stored_parts(config):
            shapes[key + part] = shape
            sizes[key + part] = [i + 1 for i in index]  # the last index is the highest
    return {key: (*sizes[key], *shape) for key, shape in shapes.items()}
