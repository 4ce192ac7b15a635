"""What the ranks of the streaming tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.converter.limited import status
from tests.mca_lib.models.factory_ranks import start


def bytes_read_at(layout: dict[str, Any], directory: Path) -> tuple[int, int, int]:
    """What loading a Hugging Face directory takes of this rank.

    Returns:
        (bytes of weights that it read, bytes of its parameters, peak of resident memory beyond that before)
    """
    from mca_lib.converter.hf_source import HfSource
    from mca_lib.converter.model_converter import ModelConverter
    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.gpt import McaGPTModel
    from mca_lib.models.model_factory import VirtualModels
    from mca_lib.models.transformer_config import transformer_config
    from mca_lib.parallel import tensor_place

    args = start(**layout)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident
    before = status("VmHWM")
    config = McaModelConfig.from_pretrained(directory)
    models = VirtualModels(McaGPTModel, config, transformer_config(config, args, perform_initialization=False))
    with HfSource(directory) as source:
        ModelConverter(config, tensor_place()).load(models, source)
        return source.bytes_read, sum(p.nbytes for p in models.parameters()), status("VmHWM") - before


def stream(source: Path, target: Path) -> dict[str, Any]:
    from mca_lib.converter.stream import convert_hf

    return convert_hf(source, target)


def load_with_a_gap_in_the_table(directory: Path) -> None:
    """With a row that leaves the last element of every norm of the layers unset."""
    import dataclasses

    from mca_lib.converter.mapping import Segment
    from mca_lib.converter.mappings import Replicated
    from mca_lib.converter.stream import convert_hf
    from mca_lib.models.registry import FAMILIES

    class Short(Replicated):
        def segments(self, config: Any, rank: int, size: int) -> Any:
            yield Segment(0, 0, config.hidden_size - 1)

        def local_shape(self, config: Any, rank: int, size: int) -> tuple[int, ...]:
            return (config.hidden_size,)

    rows = tuple(Short(m.mca, m.hf, m.dims) if m.hf == ("model.norm.weight",) else m for m in FAMILIES["llama"].weights)
    FAMILIES["llama"] = dataclasses.replace(FAMILIES["llama"], weights=rows)
    convert_hf(directory, directory.with_name("mca"))
