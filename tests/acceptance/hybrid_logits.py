"""A real transformer as a hybrid: its logits at the start, and what a few steps of training do.

    make smollm2
    python -m tests.acceptance.hybrid_logits smollm2-hf

Compared with `McaGPTModel` of the same weights, fp32, one row of text: the pattern without Mamba layers, and one with
a Mamba layer before every third layer whose output projection is zero. Then that hybrid trains for some steps on that
row. Exit status 1 where a logit differs by more than 1e-5, the loss does not fall, or a Mamba weight has not moved.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mca_lib.ranks import RankPool

LIMIT = 1e-5
STEPS = 6
TEXT = "The store keeps what was computed, and nothing that is damaged is ever used. " * 6


def logits_and_training(model: str, patterns: dict[str, str], steps: int) -> dict[str, Any]:
    """Largest |difference| of a logit for each pattern, the largest logit, and a short training of the last pattern."""
    import torch
    from transformers import AutoTokenizer

    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import TrainingArguments

    def arguments(**fields: Any) -> Any:
        return TrainingArguments(output_dir="/tmp/unused", **fields)

    initialize_model_parallel(arguments())
    ids_1S = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    positions_1S = torch.arange(ids_1S.shape[1])[None]

    @torch.no_grad()
    def logits(models: Any) -> Any:
        return models.eval()[0](ids_1S, positions_1S, None)

    transformer_1SV = logits(AutoModel.from_pretrained(model, arguments()))
    found: dict[str, Any] = {"largest": float(transformer_1SV.abs().max()), "differences": {}}
    for name, pattern in patterns.items():
        fresh = {"fresh_layers": "zero_output"} if "M" in pattern else {}
        models = AutoModel.from_pretrained(model, arguments(hybrid_layer_pattern=pattern, **fresh))
        found["differences"][name] = float((logits(models) - transformer_1SV).abs().max())
    chunk = models.train()[0]
    before = {n: p.detach().clone() for n, p in chunk.named_parameters() if ".mixer." in n}
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=2e-5)
    losses = []
    for _ in range(steps):
        loss = chunk(ids_1S, positions_1S, None, labels=ids_1S.roll(-1, 1))[:, :-1].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    parameters = dict(chunk.named_parameters())
    still = [n for n, p in before.items() if torch.equal(parameters[n], p)]
    return found | {"losses": losses, "mamba": len(before), "still": still}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model.absolute()
    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.hybrid.pattern import interpolated
    from tests.acceptance import hybrid_logits  # as `__main__` the ranks could not find it

    layers = McaModelConfig.from_pretrained(model).num_layers
    patterns = {"without Mamba layers": interpolated(layers, 0), "with Mamba layers, silent": interpolated(layers, 3)}
    pool = RankPool()
    try:
        found = pool.run_ranks(1, hybrid_logits.logits_and_training, str(model), patterns, STEPS, timeout=900)[0]
    finally:
        pool.close()
    table = Table("pattern", "largest difference of a logit", title=f"largest logit {found['largest']:.1f}")
    for name, difference in found["differences"].items():
        table.add_row(name, f"{difference:.1e}")
    Console(width=100).print(table)
    losses = found["losses"]
    print("loss by step:", " ".join(f"{loss:.4f}" for loss in losses))
    print(f"{found['mamba'] - len(found['still'])} of {found['mamba']} Mamba tensors have moved")
    equal = max(found["differences"].values()) <= LIMIT
    return 0 if equal and losses[-1] < losses[0] and not found["still"] else 1


if __name__ == "__main__":
    sys.exit(main())
