"""Chat templates and label masks by LLaMA-Factory 0.9.5: the only module that imports it.

None of what is used here is a documented API, so the release is pinned and `tests/mca_lib/data/test_llamafactory.py`
holds signatures and token sequences. Truncation, packing, splitting and caching are ours.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# Both are read on import: newer transformers, peft and datasets than its caps are tried ones (pyproject.toml), and its
# messages quote user data.
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
os.environ.setdefault("LLAMAFACTORY_VERBOSITY", "ERROR")

from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.processor import PairwiseDatasetProcessor, SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES, Template, get_template_and_fix_tokenizer

from mca_lib.data.alignment import Message, Sample, UnusableRow
from mca_lib.data.control_tokens import GuardedTokenizer
from mca_lib.data.encoding import Encoded
from mca_lib.data.images import ImageReader
from mca_lib.data.templates import check_template
from mca_lib.errors import ConfigError

_NO_TRUNCATION = 2**31
_SLOTS = ("format_user", "format_assistant", "format_system", "format_observation", "format_prefix", "format_function")


@dataclass(frozen=True)
class ChatOptions:
    """What decides the tokens and the labels of a conversation; fields of the recipe's dataset section."""

    template: str
    train_on_prompt: bool = False
    mask_history: bool = False
    default_system: str | None = None
    enable_thinking: bool | None = True


class ChatEncoder:
    """Conversations to tokens and loss mask."""

    processor_class: type = SupervisedDatasetProcessor

    def __init__(self, tokenizer: Any, options: ChatOptions) -> None:
        """Take the template; `tokenizer` may get another eos token by it.

        Raises:
            ConfigError: no such template, or one that needs a token that the tokenizer lacks.
        """
        check_template(options.template)
        _refuse_missing_tokens(TEMPLATES[options.template], tokenizer, options.template)
        size = len(tokenizer)
        template = _read_template(tokenizer, options)
        if len(tokenizer) != size:
            raise ConfigError(f"dataset.template: {options.template} adds tokens to the vocabulary of this model")
        self.stop_token_ids: list[int] = sorted(template.get_stop_token_ids(tokenizer))
        self._guard = GuardedTokenizer(tokenizer, spared=_words(template))
        self.reader: ImageReader | None = None
        masks = {"train_on_prompt": options.train_on_prompt, "mask_history": options.mask_history}
        self._processor = self.processor_class(
            template=template,
            tokenizer=self._guard,
            processor=None,
            data_args=SimpleNamespace(cutoff_len=_NO_TRUNCATION, **masks),
        )

    def encode(self, sample: Sample) -> list[Encoded]:
        """One document: the whole conversation.

        A few templates (`efficient_eos`) want the end-of-text token predicted where a question begins, which no next
        token expresses; that label is left out, except at the very end, where the token is really there.

        Raises:
            UnusableRow: a tool call or tool description that the template's tool format does not understand, or a
                control token that cannot be kept out of the text.
        """
        *prompt, answer = sample.messages
        ids, loss = _document(*self._process(sample, prompt, [answer]))
        if sample.images:
            loss = [keep and token != self.reader.token_id for token, keep in zip(ids, loss, strict=True)]
        return [(ids, loss)]

    def _process(self, sample: Sample, prompt: Sequence[Message], answers: Sequence[Message]) -> tuple[list[int], ...]:
        """What LLaMA-Factory makes of a row: ids, labels, and with two answers ids and labels of the second."""
        images = [self.reader.look(path) for path in sample.images]

        def content(text: str) -> str:
            marked = self._guard.mark(text)
            return self.reader.expand(marked, images) if sample.images else marked

        messages = [{"role": m.role, "content": content(m.content)} for m in prompt]
        responses = [{"role": m.role, "content": content(m.content)} for m in answers]
        system, tools = self._guard.mark(sample.system), self._guard.mark(sample.tools)
        try:
            return self._processor._encode_data_example(
                messages, responses, system, tools, images=[], videos=[], audios=[]
            )
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            if not (sample.tools or any(m.role == "function" for m in (*prompt, *answers))):
                raise
            # What it was given is user data: not to be quoted.
            raise UnusableRow("tools or tool call not understood") from None


class PairEncoder(ChatEncoder):
    """Two answers to one conversation, each to tokens and loss mask; loss on that answer and its end, never before.

    The prompt is tokenized once for both, so both sides begin with the same tokens. A control token within the text
    and the options are dealt with as in a conversation with one answer.
    """

    processor_class = PairwiseDatasetProcessor

    def encode(self, sample: Sample) -> list[Encoded]:
        """Two documents: the conversation with the chosen, and with the rejected answer. Raises UnusableRow."""
        assert sample.rejected is not None, "a row without a rejected answer"
        *prompt, chosen = sample.messages
        ids, labels, rejected_ids, rejected_labels = self._process(sample, prompt, [chosen, sample.rejected])
        return [_document(ids, labels), _document(rejected_ids, rejected_labels)]


def _document(ids: list[int], labels: list[int]) -> Encoded:
    return ids, [label == token for token, label in zip(ids, labels, strict=True)]


def _read_template(tokenizer: Any, options: ChatOptions) -> Template:
    """A template of our own with the options in it.

    LLaMA-Factory writes the options into the registered template, where the next data set of the process would find
    them; so it gets a copy.
    """
    registered = TEMPLATES[options.template]
    # The fields of its DataArguments that reading a template looks at.
    arguments = SimpleNamespace(
        template=options.template,
        train_on_prompt=options.train_on_prompt,
        tool_format=None,
        default_system=options.default_system,
        enable_thinking=options.enable_thinking,
        preserve_thinking=False,
    )
    TEMPLATES[options.template] = copy.deepcopy(registered)
    try:
        template = get_template_and_fix_tokenizer(tokenizer, arguments)
    except ValueError as error:
        raise ConfigError(f"dataset.template: {options.template}: {error}") from None
    finally:
        TEMPLATES[options.template] = registered
    # Images are written into the text before (`images`); the plugin of a multimodal template would look for them.
    template.mm_plugin = get_mm_plugin(name="base")
    return template


def _refuse_missing_tokens(template: Template, tokenizer: Any, name: str) -> None:
    """LLaMA-Factory would add the tokens, and the model would have no embedding for them."""
    vocabulary = tokenizer.get_vocab()
    missing = sorted({token for token in _needed_tokens(template, tokenizer) if token not in vocabulary})
    if missing:
        raise ConfigError(
            f"dataset.template: {name} needs {', '.join(map(repr, missing))}, which "
            "the model's tokenizer lacks; choose the template of this model's family"
        )


def _needed_tokens(template: Template, tokenizer: Any) -> Iterator[str]:
    yield from template.stop_words
    if tokenizer.eos_token_id is None and not template.replace_eos:
        yield "<|endoftext|>"
    for slots in (getattr(template, name).slots for name in _SLOTS):
        yield from (slot["token"] for slot in slots if isinstance(slot, dict))


def _words(template: Template) -> list[str]:
    """Words around a thought or a tool call, which belong into an answer."""
    return [word.strip() for word in (*template.thought_words, *template.tool_call_words)]
