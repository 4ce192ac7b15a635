"""Every name that lm-eval knows leads to the same files here, where lm-eval is not imported; half a minute.

python -m tests.acceptance.lm_eval_names
"""

import sys

from lm_eval.tasks import TaskManager

from mca_lib.evaluation.task_files import _of_package, _package_index


def main() -> None:
    """Exit code 1 when a task, a group or a tag differs."""
    theirs, ours = TaskManager().task_index, _package_index()
    wrong = sorted(theirs.keys() ^ ours.keys())
    for name, entry in theirs.items():
        if name in ours and entry.yaml_path is not None and ours[name] != (entry.yaml_path,):
            wrong.append(name)
        if name in ours and entry.yaml_path is None and sorted(entry.tags) != sorted(f.name for f in _of_package(name)):
            wrong.append(name)
    print(f"{len(theirs)} names of lm-eval, {len(wrong)} differ: {wrong[:10]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
