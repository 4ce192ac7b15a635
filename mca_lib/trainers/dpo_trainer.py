"""Preference optimization on Megatron-Core."""

from typing import NoReturn

from mca_lib.errors import ConfigError


class DPOTrainer:
    """Refuses: preference optimization is not part of this release."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        refuse_dpo()


def refuse_dpo() -> NoReturn:
    raise ConfigError("stage='dpo' is not supported yet: use 'sft' or 'pt'")
