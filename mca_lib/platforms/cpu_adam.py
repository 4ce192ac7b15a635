"""Adam as Megatron-Core's distributed optimizer expects it: moments per parameter, the step per parameter group.

With neither Transformer Engine nor apex, Megatron-Core (0.19.2) falls back to torch's AdamW, whose state holds a
step *tensor* per parameter. Its distributed optimizer cannot resume from that: building the load request asserts on
the empty state, `fully_reshardable` raises KeyError('step'), and `dp_reshardable` makes all parameters share one
step tensor, which then counts every parameter of every step (training goes on, wrong). An optimizer of apex's layout
takes Megatron's production paths instead. The arithmetic is torch's own fused kernel.
"""

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Drop-in for apex's FusedAdam on CPU; `adam_w_mode` decouples the weight decay."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam on CPU always corrects the bias")
        if capturable:
            raise ValueError("capturable is about CUDA graphs; there are none on CPU")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update. State is allocated for every parameter, gradient or not, so that all ranks hold the same keys."""
        for group in self.param_groups:
            done = group.get("step", 0)
            group["step"] = done + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            live = [p for p in group["params"] if p.grad is not None and p.grad.numel()]
            if not live:
                continue
            self.update(
                [p.detach() for p in live],
                [p.grad for p in live],
                [self.state[p]["exp_avg"] for p in live],
                [self.state[p]["exp_avg_sq"] for p in live],
                [],
                # The kernel adds one to the step it is given, in place: a tensor of its own per parameter.
                [torch.tensor(float(done)) for _ in live],
                foreach=False,
                fused=True,
                capturable=False,
                differentiable=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
