"""Data sets as prepared directories of arrays, which the ranks read by memory map.

One way in: :func:`prepare`.  One way out: the directories that the DataSpec it returns names.
"""

from __future__ import annotations

from experiments.data.catalog import DATA_SETS, DataSet
from experiments.data.prepare import prepare

__all__ = ["DATA_SETS", "DataSet", "prepare"]
