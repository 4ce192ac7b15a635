"""The sections of a recipe that say what is trained, how, and on which ranks.

Each field says by its type whether it is part of the key of stage *train* (see `tasks.section`).
"""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tasks.section import Execution, Section


class TrainingConfig(Section):
    """What is trained, and how. Fields of transformers' TrainingArguments keep their names."""

    stage: Literal["pt", "sft", "dpo"] = "sft"
    """Pretraining, supervised fine-tuning, or preference optimization."""
    use_mca: bool = True
    """Megatron-Core; false: LLaMA-Factory's own trainers, on the same rows in the same steps. All ranks are replicas
    then, and use_distributed_optimizer, preflight and async_save have no effect."""
    finetuning_type: Literal["full", "lora"] = "full"
    """All weights, or adapters beside frozen weights (section `lora`)."""
    global_batch_size: int = Field(default=8, ge=1, le=10**6)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Execution[PositiveInt] = 1
    """Sequences per forward pass of one data-parallel rank."""
    num_train_epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the training split, where `max_steps` is -1."""
    max_steps: int = Field(default=-1, ge=-1, le=10**9)
    """Optimizer steps; -1 derives them from `num_train_epochs`."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1.0)
    """After the warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """What every schedule but the constant one ends at."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    """Course of the learning rate after the warm-up."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of the steps, at the end, over which `warmup_stable_decay` falls."""
    decay_style: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """How `warmup_stable_decay` falls."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """AdamW's, decoupled from the gradient."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's mean of the gradient."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's mean of the squared gradient."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradient clipping threshold; 0 turns clipping off."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep fp32 master weights and reduce gradients in fp32; fp16 scales the loss dynamically."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Format of matrix products in FP8, on a GPU with Transformer Engine; with precision bf16."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss that balances the experts; 0 turns it off."""
    moe_z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the squared log-sum-exp of the router's logits."""
    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    """By how much a step moves the bias of an expert that has too few or too many tokens; for routers with a bias."""
    mtp_loss_weight: float = Field(default=0.1, ge=0)
    """Weight of the loss of multi-token prediction layers, where the model has them."""
    freeze: list[str] = Field(default_factory=list)
    """Ends of names of Hugging Face modules whose weights are kept as they are, as `embed_tokens` or `layers.0`; of a
    hybrid, `transformer` is all but the Mamba layers."""
    freeze_vision_tower: bool = True
    """Keep the vision tower of a vision-language model as it is."""
    freeze_multi_modal_projector: bool = True
    """Keep its projector, which brings features to the size of the language model, as it is."""
    freeze_language_model: bool = False
    """Keep its language model as it is."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of the order of the data and of dropout."""
    use_distributed_optimizer: Execution[bool] = True
    """Data-parallel replicas share the optimizer state."""
    overlap_grad_reduce: Execution[bool] = False
    """Reduce gradients between replicas while the backward pass goes on."""
    overlap_param_gather: Execution[bool] = False
    """Gather updated weights while the next forward pass goes on; needs both of the two above."""
    optimizer_offload_fraction: Execution[float] = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer's state that is kept and updated in CPU memory."""
    recompute_granularity: Execution[Literal["none", "selective", "full"]] = "none"
    """Activations to compute twice instead of keeping: none, those of core attention, or all of each layer."""
    logging_steps: Execution[PositiveInt] = 1
    """Steps between two lines of the log."""
    report_to: Execution[list[Literal["tensorboard", "wandb", "mlflow"]]] = Field(default_factory=list)
    """Where the log goes too, by the callbacks of transformers; their packages have to be installed."""
    eval_steps: Execution[NonNegativeInt] = 0
    """Steps between two evaluations on the held-out rows; one follows the last step too. 0 for none.
    Part of the key with `load_best_model_at_end`."""
    load_best_model_at_end: bool = False
    """The result is the model with the lowest held-out loss of all evaluations, not the last."""
    preflight: Execution[bool] = True
    """Try one step and one checkpoint, and forget them, before the training starts."""
    save_steps: Execution[NonNegativeInt] = 100
    """A checkpoint to resume from every this many steps, and of the last step; 0 for none but on SIGTERM."""
    save_total_limit: Execution[PositiveInt] = 2
    """Checkpoints to resume from that are kept, the newest ones."""
    save_keep_every: Execution[NonNegativeInt] = 0
    """Keep checkpoints of multiples of this many steps, and leave them in `<store>/.runs`; 0 for none."""
    async_save: Execution[bool] = True
    """Write checkpoints while training goes on."""

    @field_validator("report_to", "freeze", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        """One name may stand without a list, as transformers has it; `none` is the empty list."""
        if isinstance(value, str):
            return [] if value == "none" else [value]
        return value


class ParallelConfig(Section):
    """The parallel layout, all of it execution: it decides speed and memory; the result changes by rounding alone."""

    tensor: Execution[PositiveInt] = 1
    """Ranks that share each weight matrix."""
    pipeline: Execution[PositiveInt] = 1
    """Ranks that share the stack of layers."""
    virtual_pipeline: Execution[PositiveInt | None] = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: Execution[PositiveInt] = 1
    """Ranks that share each sequence."""
    expert: Execution[PositiveInt] = 1
    """Ranks that share the experts of a layer."""
    expert_tensor: Execution[PositiveInt | None] = None
    """Ranks that share each expert; by default as many as share the other weights."""
    sequence_parallel: Execution[bool] = False
    """Split the activations between tensor parallel regions too; models with experts need it to train with `tensor`."""
    first_stage_layers: Execution[PositiveInt | None] = None
    """Layers of the first pipeline rank, where it is not to have an equal share."""
    last_stage_layers: Execution[PositiveInt | None] = None
    """Layers of the last pipeline rank, where it is not to have an equal share."""
    pipeline_layout: Execution[str | None] = None
    """What each pipeline stage holds, in Megatron's notation: `Et*3|t*4L`."""


class SlurmConfig(Section):
    """What a Slurm job asks for, used when `launcher.kind` is `slurm`; fields as the options of sbatch."""

    partition: Execution[str | None] = None
    """Partition; the cluster's default when left out."""
    account: Execution[str | None] = None
    """Account that is charged."""
    qos: Execution[str | None] = None
    """Quality of service."""
    constraint: Execution[str | None] = None
    """Features that the nodes must have."""
    time_minutes: Execution[PositiveInt] = 24 * 60
    """Longest run time."""
    gpus_per_node: Execution[NonNegativeInt] = 0
    """GPUs of each node."""
    cpus_per_task: Execution[PositiveInt] = 1
    """CPU cores of each node's launcher, for all its ranks."""
    mem_gb: Execution[PositiveInt | None] = None
    """Memory of each node; the cluster's default when left out."""
    setup: Execution[list[str]] = Field(default_factory=list)
    """Lines of shell that run on each node first, as `module load cuda`."""
    additional: Execution[dict[str, str | int]] = Field(default_factory=dict)
    """Further options of sbatch, as `{exclude: node7}`."""


class LauncherConfig(Section):
    """How the ranks are started; execution throughout."""

    kind: Execution[Literal["local", "nodes", "slurm"]] = "local"
    """On this machine; on this machine and others that join (`mcaflow agent`); or in a Slurm job."""
    nnodes: Execution[int] = Field(default=1, ge=1, le=1024)
    """Machines."""
    nproc_per_node: Execution[int] = Field(default=1, ge=1, le=1024)
    """Ranks on each machine; data parallelism is what TP × PP × CP leaves of them."""
    rdzv_endpoint: Execution[str | None] = None
    """`host:port` of this machine at which the others find it, for `nodes`."""
    join_seconds: Execution[PositiveInt] = 600
    """How long to wait for the others, for `nodes`."""
    interface: Execution[str | None] = None
    """Network interface between the machines, as `eth0`; by default the one that the host's name resolves to."""
    omp_num_threads: Execution[PositiveInt] = 1
    """CPU threads of each rank."""
    max_restarts: Execution[NonNegativeInt] = 0
    """How often all ranks are started again after a failure, from the newest checkpoint."""
    slurm: Execution[SlurmConfig] = SlurmConfig()
    """The Slurm job."""

    @property
    def ranks(self) -> int:
        """Of all machines."""
        return self.nnodes * self.nproc_per_node


class LoraConfig(Section):
    """LoRA, used when `training.finetuning_type` is `lora`; fields as those of PEFT."""

    r: int = Field(default=8, ge=1, le=4096)
    """Rank of the adapters."""
    alpha: PositiveInt = 16
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs that is dropped in training."""
    use_rslora: bool = False
    """Scale by alpha / √r in place of alpha / r."""
    target_modules: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Ends of the names of Hugging Face modules, as `q_proj`; `all-linear` is every linear layer but the output layer
    and the gates."""


class DpoConfig(Section):
    """Preference optimization, used when `training.stage` is `dpo`."""

    pref_loss: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"] = "sigmoid"
    """sigmoid, hinge and ipo compare with the model as it was before training; orpo and simpo do without."""
    pref_beta: float = Field(default=0.1, gt=0)
    """How much a difference in log-probability counts; of ipo the smaller, the further apart; of orpo the weight."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are the wrong way round; sigmoid only."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """By how much the rewards of chosen and rejected are to differ; simpo only."""
    pref_ftx: float = Field(default=0.0, ge=0)
    """Weight of an added supervised loss: minus the mean log-probability of the chosen answer's tokens."""
    use_ref_model: Execution[bool | None] = None
    """May say what `pref_loss` implies, nothing else; so it is part of no key."""
