"""From the bytes of an image file to the patches that a tower reads, by the model's own image processor.

The processor is the one of transformers that runs on pillow and numpy, whatever else is installed: the same bytes give
the same patches everywhere, and torchvision is not needed.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_lib.errors import ConfigError, DataError, ModelError
from mca_lib.models.vision.directory import PROCESSOR_FILES, processor_values
from mca_lib.models.vision.images import Grid

if TYPE_CHECKING:
    import torch


def load_processor(directory: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """The image processor of a model directory.

    Args:
        min_pixels: smaller images are enlarged to so many; None: as the model's processor does.
        max_pixels: larger ones are reduced.

    Raises:
        ModelError: the directory has none.
        ConfigError: the smaller of the two sizes is the larger one.
    """
    from transformers import Qwen2VLImageProcessorPil

    processor_values(Path(directory))
    try:
        processor = Qwen2VLImageProcessorPil.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{directory}: no image processor: {' '.join(str(error).split()):.200}") from None
    size = dict(processor.size)
    given = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    size |= {name: pixels for name, pixels in given.items() if pixels is not None}
    if size["shortest_edge"] > size["longest_edge"]:
        raise ConfigError(
            f"dataset.min_pixels: images would have at least {size['shortest_edge']} and at most "
            f"{size['longest_edge']} pixels, of dataset.max_pixels or of the model's {PROCESSOR_FILES[0]}; give both"
        )
    return Qwen2VLImageProcessorPil(**{**settings(processor), "size": {n: v for n, v in size.items() if v is not None}})


def settings(processor: Any) -> dict[str, Any]:
    """JSON by which `processor_of` makes the same one."""
    names = (
        *("do_resize", "resample", "size", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
        *("do_convert_rgb", "patch_size", "temporal_patch_size", "merge_size"),
    )
    found = {name: getattr(processor, name) for name in names}
    found["size"] = {name: value for name, value in dict(found["size"]).items() if value is not None}
    found["resample"] = int(found["resample"])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def processor_of(values: dict[str, Any]) -> Any:
    """Inverse of `settings`."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**values)


def read_image(data: bytes, where: str) -> Any:
    """A pillow image in RGB, turned as its EXIF data say: of an animation the first one, without transparency.

    Raises DataError, for samples of more than 8 bits too: pillow would cut the values off.
    """
    from PIL import Image, UnidentifiedImageError
    from transformers.image_utils import load_image

    try:
        image = Image.open(io.BytesIO(data))
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{where}: more than 8 bits a sample (mode {image.mode}); write it with 8")
        return load_image(image)
    except Image.DecompressionBombError as error:
        raise DataError(f"{where}: {error!s:.200}") from None
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError):
        raise DataError(f"{where}: no image can be read from it") from None


def grid_of(processor: Any, image: Any) -> Grid:
    """Patches of an image, as the processor will cut it. Raises DataError for one that is too narrow."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size, patch = dict(processor.size), processor.patch_size
    try:
        height, width = smart_resize(
            image.height,
            image.width,
            factor=patch * processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
    except ValueError as error:
        raise DataError(str(error)) from None
    return 1, height // patch, width // patch


def pixel_values(processor: Any, image: Any) -> "tuple[Grid, torch.Tensor]":
    """(grid, fp32 patches [patches, values]) of an image."""
    import torch

    found = processor(images=[image], return_tensors="np")
    grid = tuple(int(n) for n in found["image_grid_thw"][0])
    return grid, torch.from_numpy(found["pixel_values"])
