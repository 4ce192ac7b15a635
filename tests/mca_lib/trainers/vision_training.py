"""A tiny vision-language model and a token store of pictures, for tests of training."""

import json
from pathlib import Path
from typing import Any

MODEL, STORE = "model", "store"
COLUMNS = {"prompt": "instruction", "response": "output", "images": "images"}


def make_vision(folder: Path, model_type: str, rows: int = 40) -> None:
    """`model` and `store` in a folder. Rows of the store pack several pictures; some documents have none."""
    from mca_lib.data.prepare import dataset
    from mca_lib.demo_vision import make_tiny_vision_model, make_vision_rows

    model = make_tiny_vision_model(folder / MODEL, model_type)
    spec = {
        "files": [str(make_vision_rows(folder, rows))],
        "columns": COLUMNS,
        "template": "qwen2_vl",
        "cutoff_len": 128,
        "eval_fraction": 0.2,
        "tokenizer_dir": str(model),
        "vocab_size": json.loads((model / "config.json").read_text())["text_config"]["vocab_size"],
        "output": str(folder / STORE),
    }
    dataset(spec, lambda *_, **__: None)


def train_by_arguments(folder: Path, out: Path, options: dict[str, Any]) -> None:
    """One rank of `run_train`, the result in `out/final`."""
    from mca_lib.run_train import main

    arguments = {
        "model_name_or_path": str(folder / MODEL),
        "token_store": str(folder / STORE),
        "output_dir": str(out),
        "max_steps": 2,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_steps": 0,
        "report_to": "none",
        **options,
    }
    path = out.with_suffix(".json")
    path.write_text(json.dumps(arguments))
    main([str(path)])


def weights(directory: Path) -> dict[str, Any]:
    """Name → tensor of a Hugging Face directory."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def changed_by_training(folder: Path, out: Path, options: dict[str, Any]) -> set[str]:
    """Names of the weights that a training has changed, in its export."""
    import torch

    from mca_lib.converter.export import export_hf

    train_by_arguments(folder, out, options)
    export_hf(out / "final", out / "export")
    before, after = weights(folder / MODEL), weights(out / "export")
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def answers(folder: Path, directory: Path) -> str:
    """What a trained model says of a picture, by transformers alone: its processor, its template, its generation."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    picture = next((folder / "shapes").glob("*.png"))
    images = Qwen2VLImageProcessorPil.from_pretrained(directory)(images=[Image.open(picture)], return_tensors="pt")
    features = int(images["image_grid_thw"].prod()) // 4
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Name the colour."}]}],
        tokenize=False,
        add_generation_prompt=True,
    ).replace("<|image_pad|>", "<|image_pad|>" * features)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kinds = (ids == model.config.image_token_id).int()
    output = model.generate(ids, mm_token_type_ids=kinds, **images, max_new_tokens=3, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :])


def adapter_equals_merged(folder: Path, out: Path) -> tuple[float, int]:
    """Train adapters, merge them in an export, and compare with PEFT on transformers: (largest difference of a logit,
    how many tensors PEFT misses or does not know)."""
    import warnings

    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from mca_lib.adapters.peft_files import Adapter
    from mca_lib.converter.export import export_hf
    from mca_lib.converter.stream import convert_hf
    from mca_lib.models.config import McaModelConfig

    convert_hf(folder / MODEL, out.with_name("converted"))
    train_by_arguments(folder, out, {"finetuning_type": "lora", "lora_rank": 4})
    config = McaModelConfig.from_pretrained(out.with_name("converted"))
    export_hf(out.with_name("converted"), out / "merged", adapter=Adapter(out / "final", config))
    base, merged = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for path in (folder / MODEL, out / "merged")
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(base, str(out / "final"))
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        difference = (adapted(ids).logits - merged(ids).logits).abs().max().item()
    assert any("lora" in name for name, _ in adapted.named_parameters())
    return difference, sum("missing" in str(warning.message) for warning in told)


def evaluated(folder: Path, out: Path) -> tuple[dict[str, Any], float, list[dict[str, Any]]]:
    """(figures of the job `evaluate`, the trainer's own held-out loss, samples) of a training by arguments."""
    from mca_lib.evaluate import evaluate

    changed_by_training(folder, out, {"eval_strategy": "steps", "eval_steps": 2})
    spec = {
        "models": {"base": str(folder / MODEL), "trained": str(out / "export")},
        "token_store": str(folder / STORE / "eval"),
        "tokenizer_dir": str(out / "export"),
        "max_rows": None,
        "dtype": "float32",
        "prompts": [],
        "num_samples": 2,
        "max_new_tokens": 4,
        "batch_size": 3,
        "output": str(out / "metrics"),
    }
    metrics = evaluate(spec, lambda *_, **__: None)
    samples = [json.loads(line) for line in (out / "metrics" / "samples.jsonl").read_text().splitlines()]
    return metrics, json.loads((out / "train_result.json").read_text())["eval_loss"], samples
