"""Arguments of `run_train` beside the training arguments.

Names follow LLaMA-Factory's, of which these are the part that the Megatron path needs: importing LLaMA-Factory costs
each rank 20 seconds, and its data side has run before (stage *dataset*) and left a token store.
"""

from dataclasses import dataclass, field

from mca_lib.errors import ConfigError


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "MCA or Hugging Face directory, or a name on the hub."})
    weights_digest: str | None = field(
        default=None, metadata={"help": "Digest of the weights, where it is known; adapters are bound to it."}
    )

    def __post_init__(self) -> None:
        if not self.model_name_or_path:
            raise ConfigError("model_name_or_path is empty: give a directory or a name on the hub")


@dataclass
class DataArguments:
    """Which data."""

    token_store: str | None = field(
        default=None, metadata={"help": "Directory with the splits `train` and `eval` of a token store."}
    )
    train_digest: str | None = field(
        default=None, metadata={"help": "Digest of the split `train`, where it is known; else it is computed."}
    )
    eval_digest: str | None = field(
        default=None, metadata={"help": "Digest of the split `eval`, where it is known; else it is computed."}
    )


@dataclass
class FinetuningArguments:
    """What is trained, and how."""

    stage: str = field(default="sft", metadata={"help": "pt, sft or dpo.", "choices": ["pt", "sft", "dpo"]})
    finetuning_type: str = field(default="full", metadata={"help": "full or lora.", "choices": ["full", "lora"]})
    lora_rank: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the adapters is lora_alpha / lora_rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target: str = field(default="all", metadata={"help": "Comma-separated module names, or all."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale the adapters by lora_alpha / √lora_rank."})
    use_dora: bool = field(default=False, metadata={"help": "Not supported on Megatron-Core."})
    pref_loss: str = field(default="sigmoid", metadata={"help": "sigmoid, hinge, ipo, orpo or simpo."})
    pref_beta: float = field(default=0.1, metadata={"help": "Temperature of the preference loss."})
    pref_ftx: float = field(default=0.0, metadata={"help": "Weight of a supervised term."})
    dpo_label_smoothing: float = field(default=0.0, metadata={"help": "Probability of a wrong label; sigmoid only."})
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin of the rewards; simpo only."})
    use_ref_model: bool | None = field(
        default=None, metadata={"help": "Compare with the initial model; as pref_loss needs it when left out."}
    )

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("stage", self.stage, ("pt", "sft", "dpo")),
            ("finetuning_type", self.finetuning_type, ("full", "lora")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: use one of {', '.join(allowed)}")


@dataclass
class GeneratingArguments:
    """How samples are generated after training."""

    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the likeliest token."})
    temperature: float = field(default=1.0, metadata={"help": "Sharpness of sampling."})
    top_p: float = field(default=1.0, metadata={"help": "Share of probability to sample from."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest answer."})


@dataclass
class UseMcaArguments:
    """Which backend."""

    use_mca: bool = field(default=True, metadata={"help": "Megatron-Core; false is LLaMA-Factory's trainers."})
