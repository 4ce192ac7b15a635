"""The pool of ranks that the tests share; see `mca_lib.ranks`."""

from mca_lib.ranks import RankError, RankPool

__all__ = ["RankError", "RankPool"]
