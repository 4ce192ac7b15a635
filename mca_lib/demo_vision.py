"""The demonstration of images, made here so that nothing is downloaded: ``python -m mca_lib.demo_vision DIR``.

    DIR/vision-model/    a tiny Qwen2.5-VL with random weights, tokenizer, chat template and image processor
    DIR/shapes.json      questions about pictures of coloured shapes, in alpaca format with a column `images`
    DIR/shapes/          PNG files

Every picture is one of COLOURS x SHAPES at a random place and of a random size, so held-out pictures are new ones.
Everything is decided by the seed; needs pillow.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (235, 215, 50)}
SHAPES = ("square", "circle")
QUESTIONS = {
    "colour": ("Which colour is it?", "Name the colour."),
    "shape": ("Which shape is it?", "Name the shape."),
}
SIDE = 56
"""Pixels: 2 x 2 features of patches of 14 pixels."""

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_vision_rows(directory: Path, count: int = 160, seed: int = 0) -> Path:
    """Write pictures and rows; returns the file of rows. A fifth of the rows has two pictures, a tenth none."""
    from PIL import Image, ImageDraw

    draw_from = random.Random(seed)
    folder = directory / "shapes"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def picture() -> tuple[str, dict[str, str]]:
        colour, shape = draw_from.choice(list(COLOURS)), draw_from.choice(SHAPES)
        size = draw_from.randint(24, 44)
        left, top = (draw_from.randint(2, SIDE - size - 2) for _ in range(2))
        image = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
        draw = ImageDraw.Draw(image)
        (draw.rectangle if shape == "square" else draw.ellipse)((left, top, left + size, top + size), COLOURS[colour])
        name = f"shapes/{len(rows):04d}-{draw_from.getrandbits(32):08x}.png"
        image.save(directory / name)
        return name, {"colour": colour, "shape": shape}

    for number in range(count):
        kind = draw_from.choice(list(QUESTIONS))
        question = draw_from.choice(QUESTIONS[kind])
        if number % 10 == 9:
            rows.append({"instruction": "Which colours do you know?", "output": ", ".join(COLOURS) + ".", "images": []})
            continue
        shown = [picture() for _ in range(2 if number % 5 == 4 else 1)]
        answer = " and ".join(about[kind] for _, about in shown)
        marks = "<image>" * len(shown)
        rows.append(
            {"instruction": f"{marks}{question}", "output": f"{answer}.", "images": [name for name, _ in shown]}
        )
    path = directory / "shapes.json"
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


def make_tiny_vision_model(directory: Path, model_type: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Write a tiny vision-language model as a Hugging Face directory, fp32, with all that its processor needs."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

    from mca_lib.tiny_models import END, PAD, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = dict(zip(IMAGE_TOKENS, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
    interleaved = {"mrope_interleaved": True} if model_type == "qwen3_vl" else {}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], **interleaved},
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        **({"head_dim": 16} if model_type == "qwen3_vl" else {}),
    }
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 14, "initializer_range": 0.05, **_TOWERS[model_type]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}).save_pretrained(directory)
    return directory


_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m mca_lib.demo_vision DIR", file=sys.stderr)
        return 2
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = Path(argv[0])
    directory.mkdir(parents=True, exist_ok=True)
    print(f"model {make_tiny_vision_model(directory / 'vision-model')}\nrows  {make_vision_rows(directory, 600)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
