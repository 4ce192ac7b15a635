"""Verification of a user's model: what it measures, and that a wrong model, a wrong weight or a wrong file is seen."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lib.errors import ConfigError, ModelError
from mca_lib.verification.difference import Measured
from mca_lib.verification.limits import Limits
from mca_lib.verification.round_trip import compare_weights
from mca_lib.verification.sample import make_sample
from mca_lib.verification.verify import Verification, verify
from tests.mca_lib.tiny_models import save_hf

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def pool(ranks: Any) -> Any:
    return SimpleNamespace(run_ranks=ranks)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "model", "llama3-rope")


def rewrite(model: Path, **changes: Any) -> Path:
    """Change tensors of a model's file, by the start of their name."""
    tensors = load_file(model / WEIGHTS)
    for start, change in changes.items():
        name = next(n for n in tensors if n.startswith(start.replace("__", ".")))
        tensors[name] = change(tensors[name])
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    return model


def test_a_model_without_a_tokenizer_is_verified_and_its_loss_tokens_said(pool: Any, model: Path) -> None:
    told: list[str] = []
    card = verify(Verification(model, ("one rank", "PP2", "EP2")), pool, told.append)
    assert card.verdict() == "verified", card.headline()
    assert "second half" in card.loss_tokens
    assert [r.layout for r in card.layouts if r.everything] == ["one rank", "PP2"]
    assert card.layouts[0].everything.tokens == 2 * card.layouts[0].with_loss.tokens
    assert card.layouts[2].refused
    assert len(told) == 6


def test_limits_that_are_too_tight_are_not_met(pool: Any, model: Path) -> None:
    card = verify(Verification(model, ("one rank",), Limits(1e-9, 1e-9)), pool)
    assert card.problems()[0].startswith("one rank: max |Δ|")


def test_a_layout_where_a_rank_fails_is_one_line(pool: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mca_lib.verification.verify.ranks_of", lambda layout: 3)
    result = verify(Verification(model, ("TP2",)), pool).layouts[0]
    assert "3 ranks cannot be split" in result.failed
    assert len(result.failed.splitlines()) == 1


def test_another_size_stands_in_for_a_refused_layout(pool: Any, tmp_path: Path) -> None:
    odd = save_hf(tmp_path / "odd", "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    card = verify(Verification(odd, ("TP2",), stand_ins=True), pool)
    assert [(r.layout, r.refused is None) for r in card.layouts] == [("TP2", False), ("TP3", True)]
    assert card.verdict() == "verified", card.headline()


def write_reference(model: Path, work: str) -> None:
    from mca_lib.verification import reference

    reference.write_reference(model, Path(work), make_sample(model, 99, 128))


def compare(model: Path, work: str) -> Measured:
    from mca_lib.verification import measure

    return measure.compare(model, Path(work), make_sample(model, 99, 128)).measured()


def test_a_model_with_one_other_weight_is_another_model(ranks: Any, model: Path, tmp_path: Path) -> None:
    """The reference is of the weights before: what a converter that damages one weight would look like."""
    ranks(1, write_reference, model, str(tmp_path))
    assert not Limits().exceeded(ranks(1, compare, model, str(tmp_path))[0])
    rewrite(model, model__layers__0__mlp__down_proj=lambda t: t + one(t))
    assert Limits().exceeded(ranks(1, compare, model, str(tmp_path))[0])


def one(tensor: torch.Tensor) -> torch.Tensor:
    """1e-2 at one place."""
    result = torch.zeros_like(tensor)
    result[1, 1] = 1e-2
    return result


@pytest.mark.parametrize(
    "change",
    [lambda t: t.bfloat16(), lambda t: t[:-1], lambda t: torch.where(t == t.flatten()[0], -t, t)],
    ids=["dtype", "shape", "one value"],
)
def test_a_round_trip_that_changes_a_tensor_names_it(model: Path, tmp_path: Path, change: Any) -> None:
    other = save_hf(tmp_path / "other", "llama3-rope")
    assert compare_weights(model, other).different == ()
    rewrite(other, model__norm=change)
    assert compare_weights(model, other).different == ("model.norm.weight",)


def test_zeros_of_different_sign_are_different_bytes(model: Path, tmp_path: Path) -> None:
    other = save_hf(tmp_path / "other", "llama3-rope")
    rewrite(model, model__norm=torch.zeros_like)
    rewrite(other, model__norm=lambda t: -torch.zeros_like(t))
    assert compare_weights(model, other).different == ("model.norm.weight",)


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (lambda m: rewrite(m, model__norm=lambda t: t * torch.nan), "NaN"),
    "truncated": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:5000]), WEIGHTS),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), "no weights"),
    "unknown": (lambda m: edit(m, model_type="gpt2"), "gpt2"),
    "quantized": (lambda m: edit(m, quantization_config={"quant_method": "fp8"}), "quantized"),
}


def edit(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", BAD)
def test_a_model_that_cannot_be_used_is_named(pool: Any, model: Path, case: str) -> None:
    spoil, message = BAD[case]
    spoil(model)
    with pytest.raises(ModelError, match=message):
        verify(Verification(model, ("one rank",)), pool)


def test_generations_need_a_tokenizer(pool: Any, model: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        verify(Verification(model, ("one rank",), generate=True), pool)


def test_an_untrained_model_of_small_weights_is_verified_by_limits_of_its_own(pool: Any, tmp_path: Path) -> None:
    """Its logits are small, and so are the differences that a wrong rope makes."""
    untrained = save_hf(tmp_path / "untrained", "llama", initializer_range=0.02, num_hidden_layers=2)
    card = verify(Verification(untrained, ("one rank", "TP2", "PP2×FIRST1")), pool)
    assert card.verdict() == "verified", card.headline()
    assert card.limits.max_difference < 1e-5
    blunt = replace(card, limits=Limits())
    assert blunt.verdict() == "inconclusive"
    assert "the rope's base 1 % higher" in blunt.headline()
