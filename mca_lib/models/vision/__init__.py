"""Models that see images: a vision tower of transformers before a transformer of Megatron. docs/vision.md."""
