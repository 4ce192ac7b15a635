"""Sample generations: what each model answers to the same prompts, greedily.

A prompt comes from a held-out document (what stands before its first loss token, and the first run of loss tokens as
the reference) or from the recipe, put through the tokenizer's chat template. A document without a prompt (plain
text) is continued from its first tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from mca_lib.data.alignment import UnusableRow
from mca_lib.data.control_tokens import GuardedTokenizer
from mca_lib.data.images import with_marks
from mca_lib.errors import ConfigError, ModelError
from mca_lib.evaluation.images import Picture, image_arguments
from mca_lib.evaluation.scoring import Document

# Tokens of a plain text that are given before the model continues it, and that are shown of its own continuation.
TEXT_TOKENS = 32


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    text: str
    reference: str | None
    """The answer that the data set gives; None for a prompt from the recipe."""
    pictures: tuple[Picture, ...] = ()
    """Images in it."""


def held_out_prompts(documents: Sequence[Document], tokenizer: Any, count: int) -> list[Prompt]:
    """Prompts of the first `count` documents, each text once."""
    prompts: dict[str, Prompt] = {}
    for document in documents:
        if len(prompts) == count:
            break
        prompt = _prompt_of(document, tokenizer)
        prompts.setdefault(prompt.text, prompt)
    return list(prompts.values())


def _prompt_of(document: Document, tokenizer: Any) -> Prompt:
    start = int(np.argmax(document.loss_mask))
    without_loss = np.flatnonzero(~document.loss_mask[start:])
    stop = start + int(without_loss[0]) if len(without_loss) else len(document.tokens)
    if start == 1:  # plain text: loss from the second token on
        start = max(1, min(TEXT_TOKENS, len(document.tokens) // 2))
        stop = min(stop, start + TEXT_TOKENS)
    token_ids = [int(token) for token in document.tokens[:start]]
    reference = tokenizer.decode(document.tokens[start:stop].tolist(), skip_special_tokens=True).strip()
    text, pictures = tokenizer.decode(token_ids), document.pictures
    if pictures:
        token, text = pictures[0].token_id, with_marks(text)
        shown = sum(a == token != b for a, b in zip(token_ids, [*token_ids[1:], -1], strict=True))
        pictures = pictures[:shown]
    return Prompt(token_ids, text, reference, pictures)


def recipe_prompts(texts: Sequence[str], tokenizer: Any) -> list[Prompt]:
    """Each text as the first user turn of a conversation, or as it is where the tokenizer has no chat template.

    A control token that is written in a text stays text, as in the data set.

    Raises:
        ConfigError: a text has no tokens, or the tokenizer cannot but make a control token of it.
        ModelError: the chat template cannot be rendered.
    """
    guarded = GuardedTokenizer(tokenizer)
    prompts = []
    for index, text in enumerate(texts):
        try:
            if tokenizer.chat_template:
                token_ids = guarded.encode(_render(guarded.mark(text), tokenizer))
            else:
                token_ids = tokenizer(text, split_special_tokens=True).input_ids
        except UnusableRow as error:
            raise ConfigError(f"eval.prompts: prompt {index}: {error}; write it otherwise") from error
        if not token_ids:
            raise ConfigError(f"eval.prompts: prompt {index} has no tokens; write a text, or remove it")
        prompts.append(Prompt(token_ids, tokenizer.decode(token_ids), None))
    return prompts


def _render(text: str, tokenizer: Any) -> str:
    """The conversation's text up to where the model answers."""
    chat = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        detail = " ".join(str(error).split())
        raise ModelError(f"{tokenizer.name_or_path}: its chat template cannot be rendered: {detail:.200}") from error


@torch.inference_mode()
def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    on_answered: Callable[[int], None],
) -> list[str]:
    """The model's greedy answers, without special tokens; one prompt at a time, so that none depends on another.

    Args:
        stop_ids: tokens that end an answer, beside the model's and the tokenizer's own end of text.

    Raises:
        ConfigError: a prompt leaves no room for an answer.
        ModelError: a logit is NaN or infinite.
    """
    from transformers import GenerationConfig

    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    stop_ids = sorted({*stop_ids, *end_of_text_ids(model, tokenizer)})
    answers = []
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids)
        if room is not None and length >= room:
            raise ConfigError(
                f"eval.prompts: prompt {index} has {length} tokens, which leaves no room for an answer in the model's "
                f"{room} positions; shorten it"
            )
        # Replaced whole: a published generation config brings sampling and penalties.
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens if room is None else min(max_new_tokens, room - length),
            eos_token_id=stop_ids or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stop_ids), 0),
        )
        input_ids_1S = torch.tensor([prompt.token_ids], device=next(model.parameters()).device)
        output = model.generate(
            input_ids=input_ids_1S,
            attention_mask=torch.ones_like(input_ids_1S),
            **image_arguments(model, input_ids_1S, prompt.pictures),
            output_logits=True,
            return_dict_in_generate=True,
        )
        if not all(torch.isfinite(logits_1V).all() for logits_1V in output.logits):
            raise ModelError(f"a logit after prompt {index} is not finite: the model's weights or activations overflow")
        answers.append(tokenizer.decode(output.sequences[0, length:], skip_special_tokens=True).strip())
        on_answered(index + 1)
    return answers


def end_of_text_ids(model: Any, tokenizer: Any) -> set[int]:
    """Of the model and of the tokenizer: a base model's and its chat template's may differ."""
    published = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = published if isinstance(published, list) else [published]
    return {int(token_id) for token_id in (*ids, tokenizer.eos_token_id) if token_id is not None}
