"""The code that an export of a hybrid writes, run as its users run it: from its directory, without this package."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.converter.remote_files import CODE, code_files, copy_code, is_own_code
from mca_lib.errors import ModelError
from mca_lib.evaluate import load_model
from tests.mca_lib.converter.hybrid_ranks import remote_model
from tests.mca_lib.tiny_models import token_ids

LIMIT = 3e-5
"""Of logits of about 3 in fp32."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of every kind of layer, with all switches on, saved by its own class."""
    from mca_lib.converter.remote_code.configuration_mcaflow_hybrid import McaflowHybridConfig
    from mca_lib.converter.remote_code.modeling_mcaflow_hybrid import McaflowHybridForCausalLM
    from mca_lib.models.families.mcaflow_hybrid import AUTO_MAP

    torch.manual_seed(0)
    config = McaflowHybridConfig(
        "M*-M*E",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=20,
        full_attention_layers=[4],
        attention_bias=True,
        use_qk_norm=True,
        mamba_head_dim=16,
        mamba_state_size=8,
        mamba_num_groups=2,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        use_shared_expert_gate=True,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        auto_map=AUTO_MAP,
    )
    folder = tmp_path_factory.mktemp("hybrid")
    McaflowHybridForCausalLM(config).save_pretrained(folder)
    copy_code(folder)
    return folder


def test_it_is_of_no_newer_python_than_transformers_needs() -> None:
    for path in code_files():
        ast.parse(path.read_text(), path.name, feature_version=(3, 10))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return remote_model(directory)


@torch.no_grad()
def test_tokens_in_portions_have_the_logits_of_all_at_once(model: Any) -> None:
    ids_BS = token_ids(length=70)
    whole_BSV = model(ids_BS).logits
    state, parts = None, []
    for portion in ids_BS.split([33, 1, 1, 25, 10], 1):
        output = model(portion, cache=state, use_cache=True)
        state = output.cache
        parts.append(output.logits)
    assert (torch.cat(parts, 1) - whole_BSV).abs().max() <= LIMIT
    assert whole_BSV.abs().max() > 1


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model: Any, side: str) -> None:
    ids_BS, padding = token_ids(length=40), torch.zeros(2, 7, dtype=torch.long)
    parts = [padding, ids_BS] if side == "left" else [ids_BS, padding]
    real = [torch.full_like(part, part is ids_BS) for part in parts]
    own = slice(7, None) if side == "left" else slice(40)
    padded_BSV = model(torch.cat(parts, 1), attention_mask=torch.cat(real, 1)).logits[:, own]
    assert (padded_BSV - model(ids_BS).logits).abs().max() <= LIMIT


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_with_a_state_is_generate_without(model: Any, options: dict[str, Any]) -> None:
    prompt_BS = token_ids(length=25)
    prompt_BS[1, :6] = 0  # shorter, padded on the left
    mask_BS = (torch.arange(25) >= torch.tensor([[0], [6]])).long()
    settings = {"attention_mask": mask_BS, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    assert torch.equal(model.generate(prompt_BS, **settings), model.generate(prompt_BS, use_cache=False, **settings))


def test_gradients_reach_every_weight_with_layers_computed_again_too(directory: Path) -> None:
    ids_BS, gradients = token_ids(length=40), []
    for again in (False, True):
        model = remote_model(directory).train()
        if again:
            model.gradient_checkpointing_enable()
        model(ids_BS, labels=ids_BS).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient)


@torch.no_grad()
def test_bf16_keeps_steps_and_decays_in_fp32(directory: Path, model: Any) -> None:
    narrow = remote_model(directory, dtype=torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, w in narrow.named_parameters() if w.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    ids_BS = token_ids(length=40)
    wide_BSV, narrow_BSV = model(ids_BS).logits, narrow(ids_BS).logits
    assert narrow_BSV.dtype == torch.bfloat16
    # bf16 has 8 bits: some hundredths of logits of about 3, and nothing that an error of the mathematics makes.
    assert (narrow_BSV.float() - wide_BSV).square().mean().sqrt() <= 0.05


@torch.no_grad()
def test_what_save_pretrained_writes_is_the_model_with_its_code(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {path.name for path in code_files()}
    again = remote_model(tmp_path)
    assert torch.equal(again(token_ids()).logits, model(token_ids()).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_the_code_imports_torch_and_transformers_alone() -> None:
    for path in code_files():
        imports = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        allowed = ("torch", "transformers", ".", "collections", "dataclasses", "typing")
        assert all(line.split()[1].startswith(allowed) for line in imports), path.name
    assert CODE / "modeling_mcaflow_hybrid.py" in code_files()


def test_the_evaluation_loads_it_and_no_changed_code(directory: Path, tmp_path: Path) -> None:
    assert is_own_code(directory)
    assert type(load_model(directory, "float32")).__name__ == "McaflowHybridForCausalLM"
    changed = shutil.copytree(directory, tmp_path / "changed")
    with (changed / "modeling_mcaflow_hybrid.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ModelError, match=r"modeling_mcaflow_hybrid\.py: is not the code that this version exports"):
        load_model(changed, "float32")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "other.Model"
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="auto_map is not the one that an export writes"):
        load_model(changed, "float32")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hybrid_layer_pattern": "M*-M*"}, r"not used by the model: model\.layers\.5\."),
        ({"hybrid_layer_pattern": None}, "hybrid_layer_pattern"),
        ({"mamba_chunk_size": 0}, "mamba_chunk_size=0 cannot be used"),
        ({"mamba_state_size": 16}, r"of the wrong shape: model\.layers\.0\.mamba\.in_proj"),
    ],
)
def test_the_evaluation_refuses_a_config_that_the_weights_do_not_fit(
    directory: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    changed = shutil.copytree(directory, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=said):
        load_model(changed, "float32")
