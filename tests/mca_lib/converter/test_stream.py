"""The streaming conversion: the checkpoint of a model that was never in memory is the one that Megatron writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.checkpoint.digest import checkpoint_digest
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.converter import stream
from mca_lib.converter.export import export_hf
from mca_lib.converter.hf_source import HfSource
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import CheckpointError, ConfigError, ModelError
from tests.mca_lib.converter import export_ranks, limited, llama_files, stream_ranks
from tests.mca_lib.models import factory_ranks
from tests.ranks import RankError

ROOT = Path(__file__).resolve().parents[3]
VARIANTS = ["llama-tied", "llama-bias", "qwen2", "qwen3", "mixtral", "qwen3-moe-mixed", "deepseek-mtp"]


@pytest.mark.parametrize("smallest", [1, 1 << 40], ids=["copied", "through memory"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoint_has_the_digest_of_one_that_megatron_writes_and_goes_back(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, smallest: int
) -> None:
    """Tensors of any size are copied by the kernel, or all are brought through memory."""
    monkeypatch.setattr("mca_lib.converter.stream.SMALLEST_COPY", smallest)
    monkeypatch.setattr("mca_lib.converter.export.SMALLEST_COPY", smallest)
    ranks(1, export_ranks.make_source, tmp_path / "hf", variant, "float32")
    result = convert_hf(tmp_path / "hf", tmp_path / "streamed")
    ranks(1, factory_ranks.save_at, {}, tmp_path / "hf", tmp_path / "saved")
    streamed, saved = (CheckpointReader(tmp_path / name / "model").stored for name in ("streamed", "saved"))
    assert {k: (v.size, v.properties.dtype) for k, v in streamed.items()} == {
        k: (v.size, v.properties.dtype) for k, v in saved.items()
    }
    assert checkpoint_digest(tmp_path / "saved") == {"digest": result["digest"], "parts": result["parts"]}
    for checkpoint in ("streamed", "saved"):
        export_hf(tmp_path / checkpoint, tmp_path / f"{checkpoint}-hf")
        assert _tensors(tmp_path / f"{checkpoint}-hf") == _tensors(tmp_path / "hf")


def _tensors(directory: Path) -> dict[str, tuple[Any, bytes]]:
    """Name → header and bytes of every tensor."""
    with HfSource(directory) as source:
        return {n: (info, source.slice(n)[:].numpy().tobytes()) for n, info in source.tensors.items()}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2, "virtual_pipeline": 2}), (4, {"tensor": 2, "pipeline": 2})],
)
def test_megatron_loads_it_at_every_layout(ranks: Any, tmp_path: Path, world_size: int, layout: dict[str, Any]) -> None:
    ranks(1, export_ranks.make_source, tmp_path / "hf", "llama")
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    for same, count in ranks(
        world_size, factory_ranks.same_from_both_formats, layout, tmp_path / "hf", tmp_path / "mca"
    ):
        assert same
        assert count > 5


def test_digest_made_on_the_way_is_that_of_the_files(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    result = convert_hf(tmp_path / "hf", tmp_path / "mca")
    assert checkpoint_digest(tmp_path / "mca") == {"digest": result["digest"], "parts": result["parts"]}


def test_disk_that_changes_a_byte_is_found_by_reading_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_files.make(tmp_path / "hf")
    write = stream.write_checkpoint

    def write_badly(directory: Path, *args: Any, **options: Any) -> None:
        write(directory, *args, **options)
        with (directory / "__0_1.distcp").open("r+b") as file:
            file.seek(-5000, 2)
            byte = file.read(1)
            file.seek(-5000, 2)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(stream, "write_checkpoint", write_badly)
    with pytest.raises(CheckpointError, match="what was read back is not what was written"):
        convert_hf(tmp_path / "hf", tmp_path / "mca", read_back=True)
    assert not (tmp_path / "mca").exists()


def flip_a_bit(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("smallest", [1, 1 << 40], ids=["copied", "through memory"])
def test_bit_that_flips_in_a_checkpoint_is_found_by_export_and_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: int
) -> None:
    monkeypatch.setattr("mca_lib.converter.export.SMALLEST_COPY", smallest)
    llama_files.make(tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    flip_a_bit(tmp_path / "mca" / "model" / "__0_1.distcp", -5000)
    with pytest.raises(CheckpointError, match=r"damaged checkpoint: decoder\.\S+ is not what was written"):
        export_hf(tmp_path / "mca", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(CheckpointError, match="is not what was written"):
        checkpoint_digest(tmp_path / "mca")


def test_damaged_record_is_named_and_an_absent_one_is_accepted(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    result = convert_hf(tmp_path / "hf", tmp_path / "mca")
    record = tmp_path / "mca" / "model" / "digest.json"
    text = record.read_text()
    record.write_text(text.replace(json.loads(text)["tensors"][0][3], "0" * 64))
    with pytest.raises(CheckpointError, match=r"digest\.json: is damaged"):
        export_hf(tmp_path / "mca", tmp_path / "back")
    record.unlink()
    export_hf(tmp_path / "mca", tmp_path / "back")
    assert checkpoint_digest(tmp_path / "mca")["digest"] == result["digest"]


def test_two_conversions_write_the_same_bytes(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    for name in "ab":
        convert_hf(tmp_path / "hf", tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a" / "model").glob("*.distcp"))
    assert len(files) == 2
    for file in files:
        assert (tmp_path / "a" / "model" / file).read_bytes() == (tmp_path / "b" / "model" / file).read_bytes()


def test_every_weight_is_read_once(tmp_path: Path) -> None:
    size = llama_files.make(tmp_path / "hf")
    result = convert_hf(tmp_path / "hf", tmp_path / "mca")
    assert result["bytes_read"] == result["bytes"] == size


def test_progress_ends_with_the_last_tensor(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    steps: list[tuple[int, int]] = []
    result = convert_hf(
        tmp_path / "hf", tmp_path / "mca", progress=lambda done, total, **_: steps.append((done, total))
    )
    assert steps == [(i + 1, result["tensors"]) for i in range(result["tensors"])]


def test_no_megatron_and_no_transformers_is_imported(tmp_path: Path) -> None:
    code = "import sys, mca_lib.converter.stream, mca_lib.converter.export\n"
    code += "print([m for m in ('megatron', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_rows_are_appended_for_a_larger_vocabulary(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    rows = {
        "embedding.word_embeddings.weight": torch.full((3, 64), 2.0, dtype=torch.bfloat16),
        "output_layer.weight": torch.full((3, 64), 3.0, dtype=torch.bfloat16),
    }
    convert_hf(tmp_path / "hf", tmp_path / "mca", extra_rows=rows)
    reader, source = CheckpointReader(tmp_path / "mca" / "model"), HfSource(tmp_path / "hf")
    for name, hf in zip(rows, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert torch.equal(reader.read(name), torch.cat([source.slice(hf)[:], rows[name]]))


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_rank_reads_what_it_owns_and_no_more(ranks: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    size = llama_files.make(tmp_path / "hf", num_hidden_layers=4, vocab_size=100)
    for read, owned, _ in ranks(2, stream_ranks.bytes_read_at, {**layout, "bf16": True}, tmp_path / "hf"):
        assert read == owned
        assert 0.45 * size <= read <= 0.55 * size


def test_element_that_no_row_fills_is_an_error_and_nothing_is_published(ranks: Any, tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    with pytest.raises(
        RankError, match=r"decoder\.final_layernorm\.weight: the weight table leaves a part of it unset"
    ):
        ranks(1, stream_ranks.load_with_a_gap_in_the_table, tmp_path / "hf")
    assert not (tmp_path / "mca").exists()


def test_error_of_one_worker_ends_the_other(tmp_path: Path) -> None:
    """Of 60 layers the first is damaged: the job does not go on to the last."""
    llama_files.make(tmp_path / "hf", num_hidden_layers=60)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    steps: list[int] = []
    with pytest.raises(ModelError, match=r"layers\.0\.input_layernorm\.weight holds NaN"):
        convert_hf(tmp_path / "hf", tmp_path / "mca", progress=lambda done, total, **_: steps.append(done))
    assert len(steps) < 200


@pytest.mark.parametrize("is_folder", [True, False])
def test_output_that_is_there_is_refused_before_a_weight_is_read(tmp_path: Path, is_folder: bool) -> None:
    llama_files.make(tmp_path / "hf")
    if is_folder:
        (tmp_path / "mca").mkdir()
        (tmp_path / "mca" / "precious").write_text("kept")
    else:
        (tmp_path / "mca").write_text("kept")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/mca: exists and is not empty"):
        convert_hf(tmp_path / "hf", tmp_path / "mca")
    kept = tmp_path / "mca" / "precious" if is_folder else tmp_path / "mca"
    assert kept.read_text() == "kept"


def run_limited(step: str, source: Path, target: Path, allowance: int) -> subprocess.CompletedProcess[str]:
    # One arena: glibc otherwise reserves 64 MB of address space for every thread.
    environment = {"PATH": "/usr/bin:/bin", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    command = [sys.executable, limited.__file__, step, str(source), str(target), str(allowance)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_model_three_times_the_memory_converts_and_exports(tmp_path: Path) -> None:
    """A limit of the kernel: reading the same model whole ends with an error under it."""
    size = llama_files.make(
        tmp_path / "hf", hidden_size=512, intermediate_size=1024, num_hidden_layers=58, vocab_size=4096
    )
    allowance = 50_000_000
    assert size >= 3 * allowance
    whole = run_limited("hold", tmp_path / "hf", tmp_path / "none", allowance)
    assert whole.returncode
    assert "allocate memory" in whole.stderr
    for step, source, target in (("convert", "hf", "mca"), ("export", "mca", "back")):
        run = run_limited(step, tmp_path / source, tmp_path / target, allowance)
        assert run.returncode == 0, run.stderr[-2000:]
        result = json.loads(run.stdout)
        assert result["bytes"] == size
        assert result["peak"] <= result["imported_peak"] + allowance
    source, back = HfSource(tmp_path / "hf"), HfSource(tmp_path / "back")
    assert source.tensors == back.tensors
    assert all(torch.equal(source.slice(name)[:], back.slice(name)[:]) for name in source.tensors)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
def test_source_that_changes_while_it_is_read_is_an_error(tmp_path: Path, file: str, how: str) -> None:
    """Otherwise the checkpoint would be a mixture of two models."""
    llama_files.make(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    path = tmp_path / "hf" / file
    data = path.read_bytes()

    def change(done: int, total: int, **_: object) -> None:
        if done != total // 2:
            return
        if how == "written":
            with path.open("r+b") as file:  # at no moment shorter: another thread reads
                file.write(data)
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # the clock of a file system is coarse
            return
        if how == "replaced":
            (tmp_path / "other").write_bytes(data)
            (tmp_path / "other").rename(path)
        else:
            path.unlink()

    with pytest.raises(ModelError, match=rf"{file} changed while the model was read"):
        convert_hf(tmp_path / "hf", tmp_path / "mca", progress=change)
    assert not (tmp_path / "mca").exists()


def test_export_leaves_an_existing_directory_alone_or_replaces_it_whole(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "mca")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00009.safetensors").write_text("of another export")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_hf(tmp_path / "mca", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model-00001-of-00009.safetensors"]
    export_hf(tmp_path / "mca", tmp_path / "out", replace=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "mca", "out"]


def test_export_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "mca")

    def stop(done: int, total: int, **_: object) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_hf(tmp_path / "mca", tmp_path / "out", max_shard_size="20KB", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "mca"]
