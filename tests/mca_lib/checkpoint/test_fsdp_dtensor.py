"""The format of Megatron-FSDP's checkpoints: names, rows of a tensor, and what is refused."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mca_lib.checkpoint.fsdp_dtensor import WEIGHT, FsdpCheckpoint, checkpoint_name, is_fsdp_dtensor
from mca_lib.converter.plan import entries
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.tiny_models import hf_config

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
STATE = "optimizer.state.module.module.module."


def config_of(directory, variant, **changes):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(variant, **changes).to_dict()))
    return McaModelConfig.from_pretrained(directory)


def content(config):
    """Keys → tensors as Megatron-FSDP stores them, with Transformer Engine's names and 29 rows of padding."""
    found = {"iteration": 7}
    for entry in entries(config):
        shape = entry.mapping.local_shape(config, 0, 1)
        name = entry.mca.replace(".experts.experts.", ".experts.local_experts.")
        rows = shape[0] + 29 if "embedding" in name or "output_layer" in name else shape[0]
        value = torch.randn(rows, *shape[1:])
        halves = {"_w": value[: rows // 2], "_v": value[rows // 2 :]} if "linear_fc1.weight" in name else {"": value}
        for half, tensor in halves.items():
            found[f"model.module.{name}{half}"] = tensor.clone()
            found[f"{STATE}{name}{half}.exp_avg"] = tensor.clone()
            found[f"{STATE}{name}{half}.exp_avg_sq"] = tensor.square()
        found[f"optimizer.param_to_group_meta.module.module.module.{name}.step"] = 5
    return found


def save(directory, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(config, what is stored, checkpoint of it)."""
    directory = tmp_path_factory.mktemp("fsdp")
    config = config_of(directory / "config", "llama")
    state = content(config)
    return config, state, save(directory / "checkpoint", state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestContent:
    def test_says_what_a_run_needs_to_know_before_it_loads(self, llama):
        _, _, directory = llama
        assert is_fsdp_dtensor(directory)
        found = FsdpCheckpoint(directory)
        assert (found.num_layers, found.vocabulary, found.step, found.adam_step) == (4, (128, 32), 7, 5)
        assert (found.is_hybrid, found.has_experts, found.has_optimizer) == (False, False, True)

    def test_reads_the_rows_that_are_asked_for_across_both_halves_of_a_gated_mlp(self, llama):
        config, state, directory = llama
        found = FsdpCheckpoint(directory)
        keys = found.named(WEIGHT, config)[FC1]
        whole = torch.cat([state[f"model.module.{FC1}_w"], state[f"model.module.{FC1}_v"]])
        assert found.shape(keys) == tuple(whole.shape)
        value = torch.empty(20, 8)
        found.read_rows(keys, (40, 16), value)
        assert torch.equal(value, whole[40:60, 16:24])
        assert found.bytes_read == value.nbytes

    def test_casts_what_is_stored_in_another_dtype(self, llama):
        config, state, directory = llama
        value = torch.empty(32, dtype=torch.float64)
        found = FsdpCheckpoint(directory)
        found.read_rows(found.named(WEIGHT, config)["decoder.final_layernorm.weight"], (0,), value)
        assert torch.equal(value, state["model.module.decoder.final_layernorm.weight"].double())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", None),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight3", "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight"),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight",
        ),
        ("decoder.layers.1.pre_mlp_layernorm.weight", None),
        ("embedding.word_embeddings.weight", None),
    ],
)
def test_names_of_both_implementations_of_a_layer_are_those_of_our_checkpoints(tmp_path, name, expected):
    assert checkpoint_name(name, config_of(tmp_path, "mixtral")) == (expected or name)


def without_moments(state):
    return {key: value for key, value in state.items() if not key.startswith("optimizer.")}


def of_a_hybrid(state):
    return {key.replace("final_layernorm", "final_norm"): value for key, value in state.items()}


def without(part):
    return lambda state: {key: value for key, value in state.items() if part not in key}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_moments, "holds no optimizer state; set no_load_optim"),
        (of_a_hybrid, "is of a hybrid"),
        (without(f"model.module.{FC1}_v"), f"{FC1} is stored in part: model.module.{FC1}_w alone"),
        (
            without("decoder.layers.3.self_attention.linear_proj"),
            "decoder.layers.3.self_attention.linear_proj.weight is",
        ),
        (without("layers.0.mlp.linear_fc2.weight.exp_avg_sq"), "exp_avg_sq: decoder.layers.0.mlp.linear_fc2.weight is"),
        (without("model."), "not an fsdp_dtensor checkpoint"),
    ],
)
def test_a_checkpoint_with_a_defect_is_refused_in_one_line(llama, tmp_path, change, message):
    config, state, _ = llama
    save(tmp_path / "changed", change(state))
    with pytest.raises(CheckpointError) as error:
        FsdpCheckpoint(tmp_path / "changed").check(config, optimizer=True)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 3}, "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight is not part"),
        ("llama", {"intermediate_size": 64}, r"has shape \[96, 32\], expected \[128, 32\]"),
        ("llama", {"vocab_size": 130}, r"embedding.word_embeddings.weight has shape \[128, 32\], expected \[130, 32\]"),
        ("llama-tied", {}, "output_layer.weight is not part of the model"),
        ("mixtral", {}, "is missing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(llama, tmp_path, variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        FsdpCheckpoint(llama[2]).check(config_of(tmp_path, variant, **changes), optimizer=True)


def test_half_a_checkpoint_is_refused(llama, tmp_path):
    whole = llama[2]
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        FsdpCheckpoint(tmp_path)
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    (tmp_path / "__0_0.distcp").write_bytes((whole / "__0_0.distcp").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged checkpoint: the file has"):
        FsdpCheckpoint(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="damaged checkpoint: the file is missing"):
        FsdpCheckpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="unreadable metadata"):
        FsdpCheckpoint(tmp_path)


def test_torch_dist_is_another_format(tmp_path):
    (tmp_path / ".metadata").touch()
    (tmp_path / "metadata.json").touch()
    assert not is_fsdp_dtensor(tmp_path)
    assert not is_fsdp_dtensor(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_code_in_a_checkpoint_is_not_run(tmp_path, llama):
    """An object is read by type, and what is no plain one is an error."""
    save(tmp_path / "changed", {**without("iteration")(llama[1]), "iteration": Harmful()})
    with pytest.raises(CheckpointError, match="iteration cannot be read"):
        _ = FsdpCheckpoint(tmp_path / "changed").step


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("code of a checkpoint was run",)
