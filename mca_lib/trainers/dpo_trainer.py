"""`DPOTrainer`: preference optimization on Megatron-Core, in McaTrainer's loop.

    reference log-probabilities → resume → [ batch of pairs → step → log → evaluate? → save? ]* → …

Rows hold whole pairs, so the batch size, the epochs and the position in the data are counted in rows as everywhere; the
loss is the mean over the pairs of a step. Logged beside the loss, under the names of TRL and LLaMA-Factory, as means
over pairs: rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies (share of pairs whose chosen answer
has the greater reward), logps/chosen, logps/rejected (scores as the loss takes them: sums, or means per token).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from transformers import TrainerCallback

from mca_lib.data.token_store import Row, TokenStore
from mca_lib.errors import ConfigError, DataError
from mca_lib.models import VirtualModels
from mca_lib.trainers.engine import StepMetrics
from mca_lib.trainers.loss import Objective
from mca_lib.trainers.pairs import PairBatch, PairObjective
from mca_lib.trainers.preference import PreferenceArguments
from mca_lib.trainers.reference import reference_logps
from mca_lib.trainers.trainer import McaTrainer
from mca_lib.trainers.training_args import TrainingArguments


class DPOTrainer(McaTrainer):
    """Trains model chunks on a token store of pairs.

    Args:
        model: this rank's chunks with the weights to start from, which are the reference's too. Dropout is turned off:
            the reference is asked without, and both must agree at the first step. Multi-token prediction layers, which
            have a loss per token and none per pair, stay as they are.
        args: training arguments; the process groups of their layout exist.
        train_dataset: rows of pairs to learn from.
        eval_dataset: held-out rows of pairs.
        preference: which loss.
        callbacks: as of McaTrainer.
    """

    def __init__(
        self,
        model: VirtualModels,
        args: TrainingArguments,
        train_dataset: TokenStore,
        eval_dataset: TokenStore | None = None,
        preference: PreferenceArguments | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    ) -> None:
        self.preference = preference or PreferenceArguments()
        self._reference: dict[str, np.ndarray] | None = None
        for store in (train_dataset, eval_dataset):
            if store is not None:
                _refuse_half_pairs(store)
        for chunk in model:
            _refuse_token_losses(chunk)
            _turn_off_dropout(chunk)
            _freeze_prediction_layers(chunk)
        super().__init__(model, args, train_dataset, eval_dataset, callbacks)

    def evaluate(self) -> StepMetrics:
        """Sums over the pairs of the whole evaluation split. Before training, the reference is asked first."""
        if self._reference is None:
            self._prepare()
        return super().evaluate()

    def _objective(self) -> Objective:
        return PairObjective(self.preference)

    def _prepare(self) -> None:
        super()._prepare()
        if not self.preference.needs_reference or self._reference is not None:
            return
        stores = {"train": self.train_dataset, "eval": self.eval_dataset}
        sizes = {split: store.num_documents for split, store in stores.items() if store is not None}
        steps = {"train": self._first_epoch, "eval": self._evaluation_batches}
        # One run for all layouts and losses: what differs between them does not enter these numbers.
        self._reference = reference_logps(self.output_dir, self.engine, self._data_identity(), sizes, steps)

    def _first_epoch(self) -> Iterator[Sequence[PairBatch]]:
        """Micro batches of the first epoch, or of as much of it as will be trained on."""
        for step in range(min(self.schedule.steps_per_epoch, self.schedule.total_steps)):
            yield self._batches(self.train_dataset, self.schedule.rows(step), self.shape)

    def _collate(self, store: TokenStore, rows: Sequence[Row], length: int) -> PairBatch:
        split = "train" if store is self.train_dataset else "eval"
        reference = self._reference[split] if self._reference is not None else None
        context = parallel_state.get_context_parallel_world_size()
        return PairBatch.of(super()._collate(store, rows, length), rows, reference, context)

    def _data_identity(self) -> dict[str, Any]:
        names = ("base model", "rows", "tokens", "data", "total_steps", "global_batch_size", "seed", "precision")
        identity = {name: value for name, value in super()._run_identity().items() if name in names}
        return identity if self.eval_dataset is None else identity | {"eval data": self.eval_dataset.digest}

    def _run_identity(self) -> dict[str, Any]:
        return super()._run_identity() | {"preference": vars(self.preference)}


def _refuse_half_pairs(store: TokenStore) -> None:
    odd = np.flatnonzero(np.diff(store.row_offsets) % 2)
    if len(odd):
        raise DataError(
            f"token store {store.path}: row {odd[0]} has an odd number of documents; preference optimization needs "
            "pairs of a chosen and a rejected answer (dataset.ranking: true)"
        )


def _refuse_token_losses(chunk: torch.nn.Module) -> None:
    """Losses that Megatron itself adds per token would be divided by the number of pairs."""
    config = chunk.config
    if config.num_moe_experts and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        raise ConfigError("stage='dpo' with losses of routers: set moe_aux_loss_coeff and moe_z_loss_coeff to 0")


def _freeze_prediction_layers(chunk: torch.nn.Module) -> None:
    """Without a gradient they would still decay."""
    layers = getattr(chunk, "mtp", None)
    if layers is not None:
        layers.requires_grad_(False)


def _turn_off_dropout(chunk: torch.nn.Module) -> None:
    for module in chunk.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
