"""What `make demo` trains, made here so that nothing is downloaded: ``python -m mca_lib.demo_assets DIR``.

    DIR/model/      a tiny Llama with random weights, its tokenizer and chat template
    DIR/data.json   questions and answers in alpaca format (mca_lib/demo_rows.py)
    DIR/pairs.json  questions with a right and a wrong answer, for preference optimization

The same bytes on every run, so a second demonstration finds every stage in the store.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mca_lib.demo_rows import make_preference_rows, make_rows
from mca_lib.tiny_models import make_tiny_model


@dataclass(frozen=True)
class DemoAssets:
    model_dir: Path
    """A Hugging Face directory."""
    data_file: Path
    """A JSON list of alpaca rows."""
    pairs_file: Path
    """A JSON list of alpaca rows with two answers."""


def make_demo_assets(directory: Path | str) -> DemoAssets:
    """Write the demonstration's model and data into `directory`, over what an earlier call left there."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"data.json": make_rows(), "pairs.json": make_preference_rows()}
    for name, rows in files.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (directory / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    data_file, pairs_file = (directory / name for name in files)
    return DemoAssets(make_tiny_model(directory / "model", "llama"), data_file, pairs_file)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m mca_lib.demo_assets DIR", file=sys.stderr)
        return 2
    # Imported late: a wrong command line is answered at once.
    from transformers.utils import logging

    logging.disable_progress_bar()
    assets = make_demo_assets(argv[0])
    print(f"model {assets.model_dir}\ndata  {assets.data_file}\npairs {assets.pairs_file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
