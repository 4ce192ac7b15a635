"""Files of a run's output directory that others read too. No torch here."""

LOG_NAME = "training_log.jsonl"
RESULT_NAME = "train_result.json"
