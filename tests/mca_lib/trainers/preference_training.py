"""What the tests of preference optimization share: stores of pairs, a run as a rank executes it, the same in torch."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.token_store import TokenStoreWriter
from tests.mca_lib.trainers.training import HYPERPARAMETERS, decay_groups

MEASURES = (
    "loss",
    "grad_norm",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/chosen",
    "logps/chosen",
    "logps/rejected",
)


def make_pair_store(directory: Path, rows: int, *, split: str = "train", seed: int = 0, packed: bool = True) -> Path:
    """`rows` rows of one to three pairs of random tokens, or without `packed` the same pairs, one per row.

    Prompts and answers have 2 to 8 tokens; there are few distinct tokens, and chosen answers have smaller ones.
    """
    random = np.random.default_rng(seed)
    with TokenStoreWriter(directory / split) as writer:
        for _ in range(rows):
            pairs = [make_pair(random) for _ in range(random.integers(1, 4))]
            for row in [[document for pair in pairs for document in pair]] if packed else pairs:
                writer.add_row(row)
    return directory


def make_pair(random: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, loss mask) of a chosen and of a rejected answer to one prompt."""
    prompt = random.integers(0, 12, random.integers(2, 9))
    answers = [random.integers(low, low + 8, random.integers(2, 9)) for low in (0, 4)]
    return [
        (np.concatenate([prompt, answer]), np.arange(len(prompt) + len(answer)) >= len(prompt)) for answer in answers
    ]


def train(
    model: str, store: str, out: str, options: dict[str, Any], preference: dict[str, Any], callbacks: Sequence[Any] = ()
) -> dict[str, Any]:
    """One rank of a preference training. Returns its result and its log."""
    from mca_lib.trainers.progress import read_log

    result = make_trainer(model, store, out, options, preference, callbacks).train()
    return {"result": asdict(result), "log": [line for line in read_log(Path(out)) if "loss" in line]}


def make_trainer(
    model: str, store: str, out: str, options: dict[str, Any], preference: dict[str, Any], callbacks: Sequence[Any] = ()
) -> Any:
    from mca_lib.data.token_store import TokenStore
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import DPOTrainer, Seq2SeqTrainingArguments
    from mca_lib.trainers.preference import PreferenceArguments

    args = Seq2SeqTrainingArguments(output_dir=out, **{**HYPERPARAMETERS, **options})
    initialize_model_parallel(args, args.seed)
    splits = [Path(store) / name for name in ("train", "eval")]
    stores = [TokenStore.open(path) if path.is_dir() else None for path in splits]
    loss = PreferenceArguments(**preference)
    return DPOTrainer(AutoModel.from_pretrained(model, args), args, *stores, loss, callbacks)


def plain_training(model: str, store: str, steps: int, preference: dict[str, Any]) -> list[list[float]]:
    """`MEASURES` of each step, by transformers and torch alone: two models, one document at a time."""
    import torch
    from transformers import get_scheduler

    from mca_lib.data.token_store import TokenStore
    from mca_lib.models.transformers_class import auto_class
    from mca_lib.trainers.schedule import Schedule

    settings, rows = HYPERPARAMETERS, TokenStore.open(Path(store) / "train")
    schedule = Schedule(len(rows), settings["global_batch_size"], settings["seed"], max_steps=steps)
    policy, reference = (
        auto_class(model).from_pretrained(model, dtype=torch.float32, attn_implementation="eager") for _ in range(2)
    )
    optimizer = torch.optim.AdamW(decay_groups(policy), lr=settings["learning_rate"])
    scheduler = get_scheduler(settings["lr_scheduler_type"], optimizer, settings["warmup_steps"], steps)
    history = []
    for step in range(steps):
        pairs = [pair for index in schedule.rows(step) for pair in _pairs_of(rows, index)]
        logps = torch.stack([_logp(policy, document)[0] for pair in pairs for document in pair]).view(-1, 2)
        with torch.no_grad():
            base = torch.stack([_logp(reference, document)[0] for pair in pairs for document in pair]).view(-1, 2)
        counts = torch.tensor([_logp_tokens(document) for pair in pairs for document in pair]).view(-1, 2)
        loss_P, scores, rewards = plain_losses(logps, base, counts, **preference)
        loss = loss_P.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        margins = rewards[:, 0] - rewards[:, 1]
        means = (margins, (margins > 0).float(), rewards[:, 0], scores[:, 0], scores[:, 1])
        history.append([loss.item(), norm.item(), *(m.mean().item() for m in means)])
    return history


def plain_losses(logps: Any, base: Any, counts: Any, *, pref_loss: str = "sigmoid", pref_ftx: float = 0.0) -> tuple:
    """The formulas once more, as plainly as possible; β = 0.1 and γ = 0.5. Tensors [P, 2] of chosen and rejected."""
    import torch

    beta, means = 0.1, logps / counts
    by_mean = pref_loss in ("ipo", "simpo", "orpo")
    scores, base = (means, base / counts) if by_mean else (logps, base)
    gains = scores if pref_loss in ("simpo", "orpo") else scores - base
    margin = gains[:, 0] - gains[:, 1]
    odds = torch.exp(means) / (1 - torch.exp(means))
    loss = {
        "sigmoid": lambda: -torch.log(torch.sigmoid(beta * margin)),
        "hinge": lambda: torch.clamp(1 - beta * margin, min=0),
        "ipo": lambda: (margin - 5) ** 2,
        "simpo": lambda: -torch.log(torch.sigmoid(beta * margin - 0.5)),
        "orpo": lambda: -means[:, 0] - beta * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1]))),
    }[pref_loss]()
    return loss - pref_ftx * means[:, 0], scores.detach(), (beta * gains).detach()


def _pairs_of(rows: Any, index: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    documents = [rows.document(d) for d in range(rows.row_offsets[index], rows.row_offsets[index + 1])]
    return [documents[i : i + 2] for i in range(0, len(documents), 2)]


def _logp_tokens(document: tuple[np.ndarray, np.ndarray]) -> int:
    return int(document[1].sum())


def _logp(network: Any, document: tuple[np.ndarray, np.ndarray]) -> Any:
    """Log-probability of the scored tokens of one document, [1]."""
    import torch

    ids = torch.from_numpy(document[0].astype(np.int64))
    logps = torch.log_softmax(network(input_ids=ids[None]).logits[0, :-1].float(), dim=-1)
    chosen = logps.gather(1, ids[1:, None])[:, 0]
    return chosen[torch.from_numpy(document[1][1:])].sum()[None]


def history(values: list[dict[str, Any]]) -> np.ndarray:
    """[steps, measures] from what `train` returned on each rank."""
    return np.array([[line[name] for name in MEASURES] for line in values[0]["log"]])
