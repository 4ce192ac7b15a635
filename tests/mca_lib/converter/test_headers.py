"""Headers alone tell whether weights and config fit, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mca_lib.converter.headers import PICKLE_FILE, SINGLE_FILE, check_weights
from mca_lib.errors import ModelError
from tests.mca_lib.converter.test_plan import CONFIG, headers


def write(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(info.shape, dtype=torch.bfloat16) for name, info in headers().items()}
    save_file(tensors, directory / SINGLE_FILE)
    return tensors


def test_weights_that_fit_are_accepted(tmp_path: Path) -> None:
    write(tmp_path)
    check_weights(CONFIG, tmp_path)


def test_weights_that_do_not_fit_are_named_with_their_directory(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(101, 48)}, tmp_path / SINGLE_FILE)
    message = rf"{tmp_path}: .*lm_head\.weight \[101, 48\], expected \[100, 48\]"
    with pytest.raises(ModelError, match=message) as caught:
        check_weights(CONFIG, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", '{"transformers_weights": "other.safetensors"}'), ("adapter_config.json", "{}")],
)
def test_directory_of_which_transformers_loads_other_weights_is_refused(
    tmp_path: Path, file: str, content: str
) -> None:
    write(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match="transformers"):
        check_weights(CONFIG, tmp_path)


def test_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / PICKLE_FILE).write_bytes(b"no pickle")
    check_weights(CONFIG, tmp_path)


def test_no_torch_is_needed() -> None:
    code = "import sys, mca_lib.converter.headers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
