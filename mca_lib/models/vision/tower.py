"""The vision tower: a class of transformers, on the first pipeline stage, shared out over the ranks of a micro batch.

Every rank of a tensor x context parallel group holds the whole tower and encodes its share of the images (`shares`).
All features are gathered; in the backward pass each rank gets the gradient of its own features, summed over the ranks
that used them. So a rank's gradients of the tower are those of its images, and the sum over the group is the gradient:

    over context parallel ranks    Megatron's buffers sum, as for any weight
    over tensor parallel ranks     every one of them has used all features in the same way: their gradients arrive
                                   once per rank, and `average_gradients_across_tp_domain` has Megatron divide

A rank without an image still takes part in the exchange, and its tower runs and has a gradient of exactly 0.

P patches, F features, H hidden size of the language model.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.errors import DataError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.vision.images import Grid, Images, features, shares
from mca_lib.models.vision.towers import TOWERS


def build_tower(mca_config: McaModelConfig, config: TransformerConfig) -> torch.nn.Module:
    """transformers' tower with random weights, in the dtype of the run."""
    import transformers.models
    from transformers import AutoConfig

    tower = TOWERS[mca_config.model_type]
    values = {name: value for name, value in mca_config.vision.tower.items() if name != "model_type"}
    module = getattr(transformers.models, mca_config.model_type)
    vision_config = AutoConfig.for_model(tower.model_type, **values)
    model_class = getattr(module, f"modeling_{mca_config.model_type}").__dict__[tower.model_class]
    model = model_class._from_config(vision_config, attn_implementation="sdpa", dtype=config.params_dtype)
    if config.recompute_granularity == "full":
        model.gradient_checkpointing_enable()
    for parameter in model.parameters():
        parameter.average_gradients_across_tp_domain = True
    return model


class VisionTower:
    """What a model asks of its tower. No module: `tower` is the model's own."""

    def __init__(self, mca_config: McaModelConfig, tower: torch.nn.Module) -> None:
        sizes = TOWERS[mca_config.model_type].read(mca_config.vision.tower)
        self.merge, self.patch_values, self.hidden_size = sizes.merge, sizes.patch_values, mca_config.hidden_size
        self.levels = 1 + mca_config.vision.deepstack_layers
        self.tower = tower

    def encode(self, images: Images) -> torch.Tensor:
        """Features of all images, [levels, F, H]: those of the input first, then those of the deepstack layers.

        Collective over the tensor x context parallel ranks.
        """
        group = parallel_state.get_tensor_and_context_parallel_group()
        held = shares(images.grids, group.size())
        own = held[group.rank()]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            features_FLH = self._own(images, own)
            if group.size() > 1:
                features_FLH = self._gathered(features_FLH, images.grids, held, group)
            else:
                features_FLH = features_FLH.index_select(0, self._order(images.grids, held, None))
        return features_FLH.transpose(0, 1)

    def without_images(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` itself; in training the tower gets gradients of exactly 0 through it."""
        return hidden + self._nothing().sum().to(hidden.dtype) if self.trained and torch.is_grad_enabled() else hidden

    @property
    def trained(self) -> bool:
        """Some of its weights are."""
        return any(p.requires_grad for p in self.tower.parameters())

    def _own(self, images: Images, own: list[int]) -> torch.Tensor:
        """Features of this rank's images, [F, levels, H]."""
        if not own:
            return self._nothing()
        if missing := [i for i in own if i not in images.pixels]:
            raise DataError(f"the pixels of image {missing[0]} of a micro batch are not on the rank that encodes it")
        return self._features(torch.cat([images.pixels[i] for i in own]), [images.grids[i] for i in own])

    def _nothing(self) -> torch.Tensor:
        """No features, [0, levels, H].

        In training they are those of an empty image, cut off: replicas reduce gradients and gather weights in the order
        in which modules run, so the tower has to run on all of them or on none.
        """
        weight = next(self.tower.parameters())
        if not (self.trained and torch.is_grad_enabled()):
            return weight.new_zeros((0, self.levels, self.hidden_size))
        return self._features(weight.new_zeros((self.merge**2, self.patch_values)), [(1, self.merge, self.merge)])[:0]

    def _features(self, pixels_PC: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Of some images, [F, levels, H]."""
        weight = next(self.tower.parameters())
        pixels_PC = pixels_PC.to(device=weight.device, dtype=weight.dtype)
        output = self.tower(pixels_PC, grid_thw=torch.tensor(grids, device=weight.device), return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.stack(levels, dim=1)

    def _gathered(
        self, own_FLH: torch.Tensor, grids: tuple[Grid, ...], held: list[list[int]], group: Any
    ) -> torch.Tensor:
        """All features in the order of the images, from each rank's own; shares are padded to one length."""
        counts = [sum(features(grids[i], self.merge) for i in images) for images in held]
        longest = max(counts)
        padding = own_FLH.new_zeros((longest - len(own_FLH), *own_FLH.shape[1:]))
        whole = gather_from_sequence_parallel_region(
            torch.cat([own_FLH, padding]), tensor_parallel_output_grad=True, group=group
        )
        return whole.index_select(0, self._order(grids, held, longest).to(whole.device))

    def _order(self, grids: tuple[Grid, ...], held: list[list[int]], longest: int | None) -> torch.Tensor:
        """Where each feature, in the order of the images, lies among those of all ranks."""
        places: dict[int, torch.Tensor] = {}
        for rank, images in enumerate(held):
            position = rank * (longest or 0)
            for image in images:
                count = features(grids[image], self.merge)
                places[image] = torch.arange(position, position + count)
                position += count
        return torch.cat([places[i] for i in range(len(grids))])
