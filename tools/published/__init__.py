"""Measurements that others published, as models, clusters, plans and workloads of shardwise.

`read` takes any file with the columns of `COLUMNS`. Rules go by what a cell says, never by which row it is in.
"""

from published.cells import COLUMNS, Skip
from published.rows import Row, read

__all__ = ["COLUMNS", "Row", "Skip", "read"]
