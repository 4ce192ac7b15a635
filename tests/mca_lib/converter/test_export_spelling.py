"""An exported config.json is one that the installed transformers reads, whichever release wrote the source's."""

from typing import Any

import pytest

from mca_lib.converter import export
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models.test_registry import BASE

YARN = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0}
SOURCES: dict[str, dict[str, Any]] = {
    "transformers 4": {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "transformers 5": {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN}},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("release", SOURCES)
def test_config_is_spelled_as_the_installed_release_spells_it(
    monkeypatch: pytest.MonkeyPatch, source: str, release: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: release.removeprefix("transformers ") + ".9.1")
    hf = export.hf_config(config_from_hf({**BASE, **SOURCES[source]}), "float16")
    dtype = "torch_dtype" if release == "transformers 4" else "dtype"
    assert hf == {**BASE, **SOURCES[release], dtype: "float16"}


def test_release_is_that_of_the_installed_transformers() -> None:
    import transformers

    assert export.transformers_release() == int(transformers.__version__.split(".")[0]) == 5


@pytest.mark.parametrize("source", SOURCES)
def test_installed_transformers_reads_what_is_written(source: str) -> None:
    from transformers import AutoConfig

    written = export.hf_config(config_from_hf({**BASE, **SOURCES[source]}), "float16")
    assert AutoConfig.for_model(**written).rope_parameters == SOURCES["transformers 5"]["rope_parameters"]
