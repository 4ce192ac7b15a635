"""Fields of a training that others leave without effect: no part of a key, and no reason to refuse a checkpoint."""


def idle_fields(lr_scheduler_type: str, max_steps: int, mtp_layers: int) -> frozenset[str]:
    """Names of the arguments that change nothing beside these."""
    idle = {
        "num_train_epochs": max_steps > 0,
        "min_learning_rate": lr_scheduler_type in ("constant", "constant_with_warmup"),
        "decay_ratio": lr_scheduler_type != "warmup_stable_decay",
        "decay_style": lr_scheduler_type != "warmup_stable_decay",
        "mtp_loss_weight": not mtp_layers,
    }
    return frozenset(name for name, is_idle in idle.items() if is_idle)
